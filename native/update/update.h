// An optimizer step on quantized states, as defined in hop/optim/updates.py.
#pragma once
#include "quantize/quantize.h"

namespace hop {

HOP_AT_EACH_LEVEL_OR_NEON(int update(const hop_update& u, int threads);)

}  // namespace hop
