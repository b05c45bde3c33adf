// Random bytes, some groups of blocks at a time. Included in a namespace (isa.h), after philox.

inline void noise(uint64_t key, uint32_t stream, int64_t count, uint8_t* out, int threads) {
    constexpr int64_t BYTES = GROUP * BLOCK;
    const int64_t groups = (count + BYTES - 1) / BYTES;
    Queue queue(groups, 64);
    parallel(worth(threads, count, 65536), [&](int, int) {
        for (int64_t begin, end; queue.take(begin, end);)
            for (int64_t g = begin; g < end; ++g) {
                uint8_t bytes[BYTES];
                philox(key, stream, static_cast<uint64_t>(g * GROUP), bytes);
                std::memcpy(out + g * BYTES, bytes, static_cast<size_t>(std::min(BYTES, count - g * BYTES)));
            }
    });
}
