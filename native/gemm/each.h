// Loops over arrays in registers. Included in a namespace (isa.h).

// Calls body with constants 0 to N - 1: arrays stay in registers if all their indices are constants. Bodies must be
// HOP_INLINED. The compiler reads a body N times, so HOP_UNROLL is better for loops over arrays in memory.
template <int N, class Body>
HOP_INLINE void each(const Body& body) {
    static_assert(N <= 6);
    if constexpr (N > 0) body(std::integral_constant<int, 0>());
    if constexpr (N > 1) body(std::integral_constant<int, 1>());
    if constexpr (N > 2) body(std::integral_constant<int, 2>());
    if constexpr (N > 3) body(std::integral_constant<int, 3>());
    if constexpr (N > 4) body(std::integral_constant<int, 4>());
    if constexpr (N > 5) body(std::integral_constant<int, 5>());
}

// The same for each pair.
template <class Body, int M, int... I>
HOP_INLINE void each_pair_of(const Body& body, std::integral_constant<int, M>, std::integer_sequence<int, I...>) {
    (body(std::integral_constant<int, I / M>(), std::integral_constant<int, I % M>()), ...);
}
template <int N, int M, class Body>
HOP_INLINE void each_pair(const Body& body) { each_pair_of(body, std::integral_constant<int, M>(), std::make_integer_sequence<int, N * M>()); }
