// Random bits (noise.cpp) at one level.
namespace {
#include HOP_HEADER(quantize/noise)
#include "quantize/noise_wide.h"
#include "quantize/noise_run.h"
}  // namespace
