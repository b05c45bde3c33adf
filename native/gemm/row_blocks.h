// Included in a namespace (isa.h).

// Work between tiles (gemm.h) that runs for the first row block only; the type is the same for all blocks.
template <class Between>
struct Once {
    Between& between;
    bool is_first;
    void operator()() const {
        if (is_first) between();
    }
};

// Calls body(N, first) for `rows` (at most 32) in blocks of at most `Most`, of about the same size; N is a constant.
template <int Most, int N = Most, class Body>
inline void in_row_block(int rows, int first, Body& body) {
    if constexpr (N > 1)
        if (rows < N) return in_row_block<Most, N - 1>(rows, first, body);
    body(std::integral_constant<int, N>(), first);
}

template <int Most, class Body>
inline void in_row_blocks(int rows, Body body) {
    for (int blocks = (rows + Most - 1) / Most, first = 0; blocks > 0; --blocks) {
        const int here = (rows - first + blocks - 1) / blocks;
        in_row_block<Most>(here, first, body);
        first += here;
    }
}
