#include "update/update.h"

int hop_step(const hop_update* u, int32_t threads) {
    for (int32_t i = 0; i < u->states; ++i) {
        const hop_state& s = u->state[i];
        if (!s.quantizer) continue;
        const bool one_scale = s.quantizer->rule == HOP_AMAX || s.quantizer->rule == HOP_CURRENT_SCALING;
        if (!one_scale || s.block < HOP_LEAST_BLOCK || s.block > HOP_MOST_BLOCK || HOP_MOST_BLOCK % s.block != 0)
            return HOP_UNSUPPORTED;
    }
    return HOP_BY_LEVEL_OR_NEON(update(*u, threads));
}
