#include "attention/attention.h"

int hop_attend(const hop_attention* attention, const int8_t* q, const float* q_scale, const int8_t* k, const float* k_scale,
               const int8_t* v, const float* v_scale, const void* mask, void* result, int32_t threads) {
    const hop::AttentionCall call{*attention, q, k, v, q_scale, k_scale, v_scale, mask, result, threads};
#if defined(__x86_64__)
    // Few rows read keys and values in place, without byte dot products: use the code of avx2.
    if (hop::level() == hop::Level::avx_vnni && !hop::has_few_rows(*attention)) return hop::avx_vnni::attend(call);
#endif
    return HOP_BY_LEVEL(attend(call));
}
