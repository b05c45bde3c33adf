// 24-bit random integers (hop/tensor/buffers/noise.py). Included in a namespace (isa.h), after philox.

// The 24-bit integers of blocks first..first + GROUP - 1. Each joins a byte with the bytes 4 and 9 places after it,
// cyclically within its block.
inline void wide_noise(uint64_t key, uint32_t stream, uint64_t first, uint32_t* __restrict__ out) {
    constexpr int64_t SIZE = GROUP * BLOCK;
    uint8_t bytes[SIZE], second[SIZE], third[SIZE];
    philox(key, stream, first, bytes);
    for (int64_t i = 0; i < SIZE; i += BLOCK) {
        uint8_t twice[2 * BLOCK];
        __builtin_memcpy(twice, bytes + i, BLOCK);
        __builtin_memcpy(twice + BLOCK, bytes + i, BLOCK);
        __builtin_memcpy(second + i, twice + 4, BLOCK);
        __builtin_memcpy(third + i, twice + 9, BLOCK);
    }
    for (int64_t i = 0; i < SIZE; ++i) out[i] = uint32_t(bytes[i]) << 16 | uint32_t(second[i]) << 8 | uint32_t(third[i]);
}
