// The last stages of the Hadamard transform. Included in a namespace (isa.h), before hadamard.h.

// v + other; in the lanes of `second`, which contain the second element of each pair, other - v.
HOP_INLINE __m512 butterflies(__m512 v, __m512 other, __mmask16 second) {
    return _mm512_mask_sub_ps(_mm512_add_ps(v, other), second, other, v);
}

// The stages within 16 elements, and the factor.
static void near_butterflies(float* __restrict__ y, int64_t n, int64_t size, float factor) {
    for (int64_t i = 0; i < n; i += 16) {
        const auto own = __mmask16(n - i >= 16 ? 0xffff : (1 << (n - i)) - 1);
        __m512 v = _mm512_maskz_loadu_ps(own, y + i);
        if (size >= 16) v = butterflies(v, _mm512_shuffle_f32x4(v, v, 0x4e), 0xff00);
        if (size >= 8) v = butterflies(v, _mm512_shuffle_f32x4(v, v, 0xb1), 0xf0f0);
        v = butterflies(v, _mm512_permute_ps(v, 0x4e), 0xcccc);
        v = butterflies(v, _mm512_permute_ps(v, 0xb1), 0xaaaa);
        _mm512_mask_storeu_ps(y + i, own, _mm512_mul_ps(v, _mm512_set1_ps(factor)));
    }
}
