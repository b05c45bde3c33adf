// Loops over arrays in registers. Included in a namespace (isa.h).

// Calls body with 0 to N - 1, constants: arrays that are reached by such alone lie in registers. Bodies are to be HOP_INLINED.
template <class Body, int... I>
HOP_INLINE void each_of(const Body& body, std::integer_sequence<int, I...>) { (body(std::integral_constant<int, I>()), ...); }
template <int N, class Body>
HOP_INLINE void each(const Body& body) { each_of(body, std::make_integer_sequence<int, N>()); }

// The same with each pair.
template <int N, int M, class Body>
HOP_INLINE void each_pair(const Body& body) {
    each<N>([&](auto i) HOP_INLINED { each<M>([&](auto j) HOP_INLINED { body(i, j); }); });
}
