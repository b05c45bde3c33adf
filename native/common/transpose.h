// Transposes of squares in registers. Included in a namespace (isa.h).

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define HOP_SHUFFLES 1
#endif
#endif

#if defined(HOP_SHUFFLES)
template <class T>
struct LineOf {  // 16 bytes
    typedef T type __attribute__((vector_size(16)));
};

// Interleaves elements of two 16-byte vectors.
#define HOP_LOW(T, ...) \
    inline LineOf<T>::type low_halves(LineOf<T>::type a, LineOf<T>::type b) { \
        return __builtin_shufflevector(a, b, __VA_ARGS__);                    \
    }
#define HOP_HIGH(T, ...) \
    inline LineOf<T>::type high_halves(LineOf<T>::type a, LineOf<T>::type b) { \
        return __builtin_shufflevector(a, b, __VA_ARGS__);                     \
    }
HOP_LOW(uint8_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
HOP_HIGH(uint8_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
HOP_LOW(uint16_t, 0, 8, 1, 9, 2, 10, 3, 11)
HOP_HIGH(uint16_t, 4, 12, 5, 13, 6, 14, 7, 15)
HOP_LOW(uint32_t, 0, 4, 1, 5)
HOP_HIGH(uint32_t, 2, 6, 3, 7)
#undef HOP_LOW
#undef HOP_HIGH
#endif

// Transposes a square of 16 / sizeof(T) rows and columns; reads `columns` columns and stores as many rows.
template <class T>
inline void transpose_square(const T* in, int64_t in_stride, T* out, int64_t out_stride, int64_t columns) {
    constexpr int kSide = 16 / sizeof(T);
#if defined(HOP_SHUFFLES)
    using Line = typename LineOf<T>::type;
    Line x[kSide] = {}, y[kSide];
    for (int i = 0; i < kSide; ++i) {
        if (columns == kSide) std::memcpy(&x[i], in + i * in_stride, 16);
        else std::memcpy(&x[i], in + i * in_stride, sizeof(T) * static_cast<size_t>(columns));
    }
    for (int round = 1; round < kSide; round *= 2) {
        for (int i = 0; i < kSide / 2; ++i) {
            y[2 * i] = low_halves(x[i], x[i + kSide / 2]);
            y[2 * i + 1] = high_halves(x[i], x[i + kSide / 2]);
        }
        for (int i = 0; i < kSide; ++i) x[i] = y[i];
    }
    if (columns == kSide)
        for (int i = 0; i < kSide; ++i) std::memcpy(out + i * out_stride, &x[i], 16);
    else
        for (int64_t i = 0; i < columns; ++i) std::memcpy(out + i * out_stride, &x[i], 16);
#else
    for (int64_t i = 0; i < columns; ++i)
        for (int j = 0; j < kSide; ++j) out[i * out_stride + j] = in[j * in_stride + i];
#endif
}
