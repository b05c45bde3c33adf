// Random bits (noise.cpp) at a level.
namespace {
#include HOP_HEADER(quantize/noise)
#include "quantize/noise_wide.h"
#include "quantize/noise_run.h"
}  // namespace
