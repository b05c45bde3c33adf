// The replacement of noise_avx512.h for other instruction sets: loops that compilers vectorize. Included in a namespace
// (isa.h).
constexpr int64_t GROUP = 32, BLOCK = 16;

// Computes blocks first..first + GROUP - 1, 16 bytes each. All supported CPUs are little-endian.
inline void philox(uint64_t key, uint32_t stream, uint64_t first, uint8_t* out) {
    uint32_t w0[GROUP], w1[GROUP], w2[GROUP], w3[GROUP];
    for (int64_t i = 0; i < GROUP; ++i) {
        const uint64_t block = first + static_cast<uint64_t>(i);
        w0[i] = static_cast<uint32_t>(block), w1[i] = static_cast<uint32_t>(block >> 32), w2[i] = stream, w3[i] = 0;
    }
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
        for (int64_t i = 0; i < GROUP; ++i) {
            const uint64_t a = uint64_t{0xD2511F53} * w0[i], b = uint64_t{0xCD9E8D57} * w2[i];
            const uint32_t x0 = static_cast<uint32_t>(b >> 32) ^ w1[i] ^ k0;
            const uint32_t x2 = static_cast<uint32_t>(a >> 32) ^ w3[i] ^ k1;
            w0[i] = x0, w1[i] = static_cast<uint32_t>(b), w2[i] = x2, w3[i] = static_cast<uint32_t>(a);
        }
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    for (int64_t i = 0; i < GROUP; ++i) {
        const uint32_t words[4] = {w0[i], w1[i], w2[i], w3[i]};
        __builtin_memcpy(out + i * BLOCK, words, BLOCK);
    }
}
