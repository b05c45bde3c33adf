// Loops over arrays in registers. Included in a namespace (isa.h).

// Calls body with constants 0 to N - 1: arrays stay in registers if all their indices are constants. Bodies must be
// HOP_INLINED. The compiler reads a body N times, so HOP_UNROLL is better for loops over arrays in memory.
template <class Body, int... I>
HOP_INLINE void each_of(const Body& body, std::integer_sequence<int, I...>) {
    (body(std::integral_constant<int, I>()), ...);
}
template <int N, class Body>
HOP_INLINE void each(const Body& body) { each_of(body, std::make_integer_sequence<int, N>()); }

// The same for each pair.
template <class Body, int M, int... I>
HOP_INLINE void each_pair_of(const Body& body, std::integral_constant<int, M>, std::integer_sequence<int, I...>) {
    (body(std::integral_constant<int, I / M>(), std::integral_constant<int, I % M>()), ...);
}
template <int N, int M, class Body>
HOP_INLINE void each_pair(const Body& body) { each_pair_of(body, std::integral_constant<int, M>(), std::make_integer_sequence<int, N * M>()); }
