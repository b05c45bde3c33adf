// A step of an optimizer on quantized states, as hop/optim/updates.py defines it.
#pragma once
#include "quantize/quantize.h"

namespace hop {

HOP_AT_EACH_LEVEL_OR_NEON(int update(const hop_update& u, int threads);)

}  // namespace hop
