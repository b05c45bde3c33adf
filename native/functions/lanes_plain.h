// One float64 at a time. Included in a namespace.

using V = double;
using I = uint64_t;
constexpr int kWidth = 1;
constexpr int kParts = 16;  // parts of a power of two, in a table

HOP_INLINE V set(double x) { return x; }
HOP_INLINE I whole(uint64_t x) { return x; }
HOP_INLINE V load(const float* x) { return *x; }
HOP_INLINE void store(float* y, V v) { *y = static_cast<float>(v); }
HOP_INLINE V fused(V a, V b, V c) { return a * b + c; }
HOP_INLINE V over(V a, V b) { return a / b; }
HOP_INLINE V root(V a) { return std::sqrt(a); }
// Minimum and maximum of a bound and a number; NaN if the number is NaN.
HOP_INLINE V smaller(V bound, V x) { return bound < x ? bound : x; }
HOP_INLINE V larger(V bound, V x) { return bound > x ? bound : x; }
HOP_INLINE I bits(V v) {
    I i;
    __builtin_memcpy(&i, &v, 8);
    return i;
}
HOP_INLINE V number(I i) {
    V v;
    __builtin_memcpy(&v, &i, 8);
    return v;
}
HOP_INLINE I both(I a, I b) { return a & b; }
HOP_INLINE I either(I a, I b) { return a | b; }
HOP_INLINE I sum(I a, I b) { return a + b; }
HOP_INLINE I difference(I a, I b) { return a - b; }
template <int n>
HOP_INLINE I left(I a) { return a << n; }
template <int n>
HOP_INLINE I right(I a) { return a >> n; }
HOP_INLINE V lookup(const double* table, I index) { return table[index & 15]; }
HOP_INLINE V where_negative(V x, V a, V b) { return bits(x) >> 63 ? a : b; }
HOP_INLINE int at_most(I a, I b) { return static_cast<int64_t>(a) <= static_cast<int64_t>(b); }
HOP_INLINE int between(V x, double low, double high) { return x > low && x < high; }
