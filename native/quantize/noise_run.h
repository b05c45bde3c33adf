// Random integers, several groups of blocks at a time. Included in a namespace (isa.h), after noise_wide.h.

template <class Word, class Make>
inline void noise_of(int64_t count, Word* out, int threads, const Make& make) {
    constexpr int64_t NUMBERS = GROUP * BLOCK;
    const int64_t groups = (count + NUMBERS - 1) / NUMBERS;
    Queue queue(groups, 64);
    parallel(worth(threads, count, 65536), [&](int, int) {
        for (int64_t begin, end; queue.take(begin, end);)
            for (int64_t g = begin; g < end; ++g) {
                const int64_t left = count - g * NUMBERS;
                if (left >= NUMBERS) {
                    make(static_cast<uint64_t>(g * GROUP), out + g * NUMBERS);
                } else {
                    Word numbers[NUMBERS];
                    make(static_cast<uint64_t>(g * GROUP), numbers);
                    std::memcpy(out + g * NUMBERS, numbers, static_cast<size_t>(left) * sizeof(Word));
                }
            }
    });
}

inline void noise(uint64_t key, uint32_t stream, int64_t count, int bits, void* out, int threads) {
    if (bits == 24)
        noise_of(count, static_cast<uint32_t*>(out), threads,
                 [=](uint64_t first, uint32_t* to) { wide_noise(key, stream, first, to); });
    else
        noise_of(count, static_cast<uint8_t*>(out), threads,
                 [=](uint64_t first, uint8_t* to) { philox(key, stream, first, to); });
}
