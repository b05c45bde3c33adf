// Philox4x32-10, four blocks per vector: each word is in a 64-bit lane. Multiplications read only the lower half, so
// the upper half is arbitrary. Included in a namespace (isa.h).
constexpr int64_t GROUP = 32, BLOCK = 16;

// Computes blocks first..first + GROUP - 1, 16 bytes each.
inline void philox(uint64_t key, uint32_t stream, uint64_t first, uint8_t* out) {
    constexpr int vectors = 2, blocks = 4 * vectors;
    const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57);
    for (int64_t at = 0; at < GROUP; at += blocks) {
        __m256i w0[vectors], w1[vectors], w2[vectors], w3[vectors];
        HOP_UNROLL
        for (int i = 0; i < vectors; ++i) {
            const __m256i begin = _mm256_set1_epi64x(static_cast<int64_t>(first) + at + 4 * i);
            w0[i] = _mm256_add_epi64(begin, _mm256_setr_epi64x(0, 1, 2, 3));
            w1[i] = _mm256_srli_epi64(w0[i], 32), w2[i] = _mm256_set1_epi64x(stream), w3[i] = _mm256_setzero_si256();
        }
        uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
        for (int round = 0; round < 10; ++round) {
            const __m256i key0 = _mm256_set1_epi64x(k0), key1 = _mm256_set1_epi64x(k1);
            HOP_UNROLL
            for (int i = 0; i < vectors; ++i) {
                const __m256i a = _mm256_mul_epu32(w0[i], m0), b = _mm256_mul_epu32(w2[i], m1);
                w0[i] = _mm256_xor_si256(_mm256_srli_epi64(b, 32), _mm256_xor_si256(w1[i], key0));
                w2[i] = _mm256_xor_si256(_mm256_srli_epi64(a, 32), _mm256_xor_si256(w3[i], key1));
                w1[i] = b, w3[i] = a;
            }
            k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
        HOP_UNROLL
        for (int i = 0; i < vectors; ++i) {
            const __m256i low = _mm256_blend_epi32(w0[i], _mm256_slli_epi64(w1[i], 32), 0xaa);
            const __m256i high = _mm256_blend_epi32(w2[i], _mm256_slli_epi64(w3[i], 32), 0xaa);
            const __m256i even = _mm256_unpacklo_epi64(low, high), odd = _mm256_unpackhi_epi64(low, high);
            auto* to = reinterpret_cast<__m256i*>(out + (at + 4 * i) * BLOCK);
            _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
            _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
        }
    }
}
