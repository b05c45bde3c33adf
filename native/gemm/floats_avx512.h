// Float products with AVX-512. Included in a namespace (isa.h), after engine_avx512.h.
//
// The order in which products are added depends only on k, not on the number of rows: each element has one accumulator,
// to which `Numbers` adds a chunk's products in the order of k:
//
//     template <int N> add(a, left, right, quad, e, sums)
//         products of rows of lhs and words of 32 columns: k 0 and 2 of a quad (e = 0), or k 1 and 3 (e = 1)

// For functions on arrays that must stay in registers: a call would spill them to memory.
#define HOP_IN_REGISTERS inline __attribute__((always_inline))

// Adds the products of one quad of tiles.
template <class Numbers, int N>
HOP_IN_REGISTERS void add_quad(const uint8_t* a, const uint8_t* b, int quad, int e, __m512 (&c)[N][2]) {
    Numbers::template add<N>(a, load512(b + e * kTile + quad * 64), load512(b + (2 + e) * kTile + quad * 64), quad, e, c);
}

// The Numbers of kept_groups and FewGroups.
template <class Products>
struct KeptFloats {
    using Vector = __m512;
    static constexpr int kBytes = 2, kLhsBytes = Products::kLhsBytes;
    template <int N, bool Zero>
    using Narrow = NarrowWordsOfGroups<N, Zero, Products>;
    template <int N, int Codes>
    using Bytes = BytesWordsOfGroups<N, Codes, Products>;
    static Vector zero() { return _mm512_setzero_ps(); }
    static __m512 number(Vector x) { return x; }

    template <int N, int S>
    HOP_INLINED static void quad(const uint8_t* a, const uint8_t* b, int at, Vector (&sums)[S][N][2]) {
        add_quad<Products>(a, b, at, 0, sums[0]);
        add_quad<Products>(a, b, at, 1, sums[0]);
    }
};

template <class Numbers, class FewRows = void>
class Floats : public Numbers {
public:
    using Sum = float;
    using Numbers::kLhsBytes;
    static constexpr int kBytes = 2;
    static constexpr bool kFewRows = !std::is_void<FewRows>::value, kKept = true;
    using Few = FewRows;

    Floats(int, int quads) : quads_(quads) {}

    template <int R, class Between>
    void multiply(const uint8_t* a, const uint8_t* b, int rows, int64_t slices, Sum* sums, bool add, Between& between) {
        in_row_blocks<kMost>(rows, [&](auto n, int first) {
            block<n.value>(a + first * kRow, R * kLhsBytes * kTile, b, slices, 0, kQuads, sums + first * kBlock, add,
                           Once<Between>{between, first == 0});
        });
    }

    template <int R, class Between>
    void step(const uint8_t* a, const uint8_t* b, int rows, int quad, Sum* sums, Between& between) {
        in_row_blocks<kMost>(rows, [&](auto n, int first) {
            block<n.value>(a + first * kRow, 0, b, 1, quad, quads_, sums + first * kBlock, false, Once<Between>{between, false});
        });
    }

    static bool keeps(const Job& job) { return keeps_groups(job); }
    template <class Between>
    void groups(const Job& job, const KeptGroups& kept, int rows, Between& between) {
        keep_groups<KeptFloats<Numbers>>(job, kept, rows, between);
    }

private:
    static constexpr int kMost = 12, kRow = kLhsBytes * kSlice;  // rows at a time: 24 accumulators; bytes of one row

    template <int N, class Between>
    static void block(const uint8_t* a, int64_t stride, const uint8_t* b, int64_t slices, int quad, int quads,
                      Sum* sums, bool add, const Between& between) {
        __m512 c[N][2];
        HOP_UNROLL
        for (int i = 0; i < N; ++i) {
            HOP_UNROLL
            for (int half = 0; half < 2; ++half)
                c[i][half] = add ? _mm512_loadu_ps(sums + i * kBlock + half * kRows) : _mm512_setzero_ps();
        }
        for (; slices > 0; --slices, a += stride, b += 2 * kBytes * kTile) {
            for (int q = quad; q < quad + quads; ++q)
                for (int e = 0; e < 2; ++e) add_quad<Numbers>(a, b, q, e, c);
            between();
        }
        HOP_UNROLL
        for (int i = 0; i < N; ++i) {
            HOP_UNROLL
            for (int half = 0; half < 2; ++half) _mm512_storeu_ps(sums + i * kBlock + half * kRows, c[i][half]);
        }
    }

    int quads_;
};
