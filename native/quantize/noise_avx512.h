// Philox4x32-10 on GROUP counters, eight per vector: each word is in a 64-bit lane. Multiplications read only the lower
// half, so the upper half is arbitrary. Included in a namespace (isa.h).
constexpr int64_t GROUP = 32, BLOCK = 16;

// Computes blocks first..first + GROUP - 1, 16 bytes each.
inline void philox(uint64_t key, uint32_t stream, uint64_t first, uint8_t* out) {
    constexpr int vectors = GROUP / 8;
    const __m512i m0 = _mm512_set1_epi64(0xD2511F53), m1 = _mm512_set1_epi64(0xCD9E8D57);
    const __m512i counting = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    __m512i w0[vectors], w1[vectors], w2[vectors], w3[vectors];
    HOP_UNROLL
    for (int i = 0; i < vectors; ++i) {
        w0[i] = _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(first + static_cast<uint64_t>(8 * i))), counting);
        w1[i] = _mm512_srli_epi64(w0[i], 32), w2[i] = _mm512_set1_epi64(stream), w3[i] = _mm512_setzero_si512();
    }
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
        const __m512i key0 = _mm512_set1_epi64(k0), key1 = _mm512_set1_epi64(k1);
        HOP_UNROLL
        for (int i = 0; i < vectors; ++i) {
            const __m512i a = _mm512_mul_epu32(w0[i], m0), b = _mm512_mul_epu32(w2[i], m1);
            w0[i] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(b, 32), w1[i], key0, 0x96);
            w2[i] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(a, 32), w3[i], key1, 0x96);
            w1[i] = b, w3[i] = a;
        }
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    const __m512i lower = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), upper = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
    HOP_UNROLL
    for (int i = 0; i < vectors; ++i) {
        const __m512i low = _mm512_mask_blend_epi32(0xaaaa, w0[i], _mm512_slli_epi64(w1[i], 32));
        const __m512i high = _mm512_mask_blend_epi32(0xaaaa, w2[i], _mm512_slli_epi64(w3[i], 32));
        _mm512_storeu_si512(out + i * 128, _mm512_permutex2var_epi64(low, lower, high));
        _mm512_storeu_si512(out + i * 128 + 64, _mm512_permutex2var_epi64(low, upper, high));
    }
}
