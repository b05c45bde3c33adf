// Dot products of four bytes with AVX2, as int16: of bytes 0 and 2, and of 1 and 3. Included in a namespace, after lanes.h.

struct Quads {
    __m256i even[2], odd[2];
};
struct Sums {
    __m256i half[2];
};
struct Four {
    __m256i even, odd;
};
constexpr int kRowsAtOnce = 4, kLinesAtOnce = 1;

HOP_INLINE Quads quads(const uint8_t* p) {
    Quads q;
    for (int half = 0; half < 2; ++half) {
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + half * 32));
        q.even[half] = _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 8);
        q.odd[half] = _mm256_srai_epi16(codes, 8);
    }
    return q;
}
HOP_INLINE Four four(const uint8_t* p) {
    int32_t bytes;
    __builtin_memcpy(&bytes, p, 4);
    const __m256i all = _mm256_set1_epi32(bytes);
    return {_mm256_and_si256(all, _mm256_set1_epi16(255)), _mm256_srli_epi16(all, 8)};
}
HOP_INLINE Sums dot(Sums sum, const Four& x, const Quads& y) {
    for (int half = 0; half < 2; ++half) {
        sum.half[half] = _mm256_add_epi32(sum.half[half], _mm256_madd_epi16(x.even, y.even[half]));
        sum.half[half] = _mm256_add_epi32(sum.half[half], _mm256_madd_epi16(x.odd, y.odd[half]));
    }
    return sum;
}
HOP_INLINE Sums sums_of(Ints x) { return load_as<Sums>(&x); }
HOP_INLINE Ints ints_of(Sums x) { return load_as<Ints>(&x); }
HOP_INLINE Floats fused(Floats a, Floats b, Floats c) { return a * b + c; }
HOP_INLINE bool any(Ints mask) {
    __m256i halves[2];
    __builtin_memcpy(halves, &mask, sizeof(mask));
    return !_mm256_testz_si256(_mm256_or_si256(halves[0], halves[1]), _mm256_set1_epi32(-1));
}
