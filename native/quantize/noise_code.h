// Random bits (noise.cpp) at a level.
namespace {
#include HOP_WIDE_OR_PLAIN(quantize/noise)
#include "quantize/noise_run.h"
}  // namespace
