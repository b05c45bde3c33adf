// Transposes in units of cache lines. Included in a namespace (isa.h), after transpose.h.

constexpr int64_t kLine = 64;  // bytes of a cache line: reads and writes cover whole lines

// Transposes a square one cache line wide, through a copy on the stack: rows at a power-of-two distance share cache
// sets and would evict each other between two squares of registers.
template <class T>
inline void transpose_lines(const T* in, int64_t in_stride, T* out, int64_t out_stride) {
    constexpr int kSide = kLine / sizeof(T), kSquare = 16 / sizeof(T);
    alignas(kLine) T rows[kSide * kSide];
    for (int i = 0; i < kSide; ++i) std::memcpy(rows + i * kSide, in + i * in_stride, kLine);
    for (int j = 0; j < kSide; j += kSquare)
        for (int i = 0; i < kSide; i += kSquare)
            transpose_square(rows + i * kSide + j, int64_t{kSide}, out + j * out_stride + i, out_stride, int64_t{kSquare});
}
