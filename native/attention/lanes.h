// Vectors at any level, as compilers' vector types. Included in a namespace, before the dot products of a level. AVX2
// uses vectors of eight: GCC splits comparisons and selections of longer ones into scalars.

#if defined(HOP_IN_AVX2) || defined(HOP_IN_AVX_VNNI)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 16;
#endif
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Codes = uint8_t __attribute__((vector_size(kLanes)));

template <class V, class T>
HOP_INLINE V load_as(const T* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof(V));
    return v;
}

template <class V, class T>
HOP_INLINE void store_as(T* p, V v) { __builtin_memcpy(p, &v, sizeof(V)); }

HOP_INLINE Floats all(float x) { return Floats{} + x; }
HOP_INLINE Ints all_ints(int32_t x) { return Ints{} + x; }
HOP_INLINE Ints bits(Floats x) { return load_as<Ints>(&x); }
HOP_INLINE Floats number(Ints x) { return load_as<Floats>(&x); }
#if defined(HOP_IN_AVX2) || defined(HOP_IN_AVX_VNNI)
HOP_INLINE Floats larger(Floats a, Floats b) { return Floats(_mm256_max_ps(__m256(a), __m256(b))); }
HOP_INLINE Ints either_nan(Floats a, Floats b) { return Ints(_mm256_cmp_ps(__m256(a), __m256(b), _CMP_UNORD_Q)); }
HOP_INLINE Ints nearest(Floats x) { return Ints(_mm256_cvtps_epi32(__m256(x))); }  // integers from 0 to 2^22 - 1
#else
HOP_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }
HOP_INLINE Ints either_nan(Floats a, Floats b) { return (a != a) | (b != b); }
HOP_INLINE Ints nearest(Floats x) { return bits(x + kWhole) & 0x3fffff; }
#endif
HOP_INLINE float infinity() { return float_of(kInfinity); }
HOP_INLINE float not_a_number() { return float_of(0x7fc00000); }
HOP_INLINE Ints counted() {
    Ints v;
    for (int i = 0; i < kLanes; ++i) v[i] = i;
    return v;
}

HOP_INLINE float largest_of(Floats v) {
    float most = v[0];
    for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
    return most;
}

HOP_INLINE int32_t total_of(Ints v) {
    int32_t total = 0;
    for (int i = 0; i < kLanes; ++i) total += v[i];
    return total;
}

HOP_INLINE bool any_of(Ints v) {
    int32_t found = 0;
    for (int i = 0; i < kLanes; ++i) found |= v[i];
    return found != 0;
}
