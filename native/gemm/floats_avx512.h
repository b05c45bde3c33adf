// Float products with AVX-512. Included in a namespace (isa.h), after engine_avx512.h.
//
// The order in which products are added depends only on k, not on the number of rows. Each Numbers class has kChains
// independent accumulators for each element; each chain adds a chunk's products in the order of k:
//
//     template <int N> add(a, left, right, quad, e, sums)
//         products of rows of lhs and words of 32 columns: k 0 and 2 of a quad (e = 0), or k 1 and 3 (e = 1)
//
// A single chain adds both; with two chains each adds one, and the chains are added at the end of a chunk. Groups use
// one chain.

// For functions on arrays that must stay in registers: a call would spill them to memory.
#define HOP_IN_REGISTERS inline __attribute__((always_inline))

// Adds the products of one quad of tiles.
template <class Numbers, int N>
HOP_IN_REGISTERS void add_quad(const uint8_t* a, const uint8_t* b, int quad, int e, __m512 (&c)[N][2]) {
    Numbers::template add<N>(a, load512(b + e * kTile + quad * 64), load512(b + (2 + e) * kTile + quad * 64), quad, e, c);
}

// The Numbers of kept_groups and FewGroups: one chain for each element and group.
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
    static constexpr int kChains = Numbers::kChains;

    template <int N, class Between>
    static void block(const uint8_t* a, int64_t stride, const uint8_t* b, int64_t slices, int quad, int quads,
                      Sum* sums, bool add, const Between& between) {
        if constexpr (kChains * N <= kMost) {
            __m512 c[kChains][N][2];
            begin<N>(sums, add, c[0]);
            for (int chain = 1; chain < kChains; ++chain) begin<N>(sums, false, c[chain]);
            for (; slices > 0; --slices, a += stride, b += 2 * kBytes * kTile) {
                for (int q = quad; q < quad + quads; ++q) {
                    add_quad<Numbers>(a, b, q, 0, c[0]);
                    add_quad<Numbers>(a, b, q, 1, c[kChains - 1]);
                }
                between();
            }
            if constexpr (kChains == 2) end<N>(c[0], c[1], sums);
            else end<N>(c[0], sums);
        } else {  // one chain after the other: the registers hold only one chain
            __m512 c[N][2], first[N][2];
            begin<N>(sums, add, c);
            chain<N>(a, stride, b, slices, quad, quads, 0, c, between);
            end<N>(c, sums);
            begin<N>(sums, false, c);
            chain<N>(a, stride, b, slices, quad, quads, 1, c, [] {});
            begin<N>(sums, true, first);
            end<N>(first, c, sums);
        }
    }

    template <int N, class Between>
    static HOP_IN_REGISTERS void chain(const uint8_t* a, int64_t stride, const uint8_t* b, int64_t slices, int quad, int quads, int e,
                      __m512 (&c)[N][2], const Between& between) {
        for (; slices > 0; --slices, a += stride, b += 2 * kBytes * kTile) {
            for (int q = quad; q < quad + quads; ++q) add_quad<Numbers>(a, b, q, e, c);
            between();
        }
    }

    template <int N>
    static HOP_IN_REGISTERS void begin(const Sum* sums, bool add, __m512 (&c)[N][2]) {
        HOP_UNROLL
        for (int i = 0; i < N; ++i) {
            HOP_UNROLL
            for (int half = 0; half < 2; ++half)
                c[i][half] = add ? _mm512_loadu_ps(sums + i * kBlock + half * kRows) : _mm512_setzero_ps();
        }
    }
    template <int N>
    static HOP_IN_REGISTERS void end(const __m512 (&c)[N][2], Sum* sums) {
        HOP_UNROLL
        for (int i = 0; i < N; ++i) {
            HOP_UNROLL
            for (int half = 0; half < 2; ++half) _mm512_storeu_ps(sums + i * kBlock + half * kRows, c[i][half]);
        }
    }
    template <int N>
    static HOP_IN_REGISTERS void end(const __m512 (&c)[N][2], const __m512 (&more)[N][2], Sum* sums) {
        HOP_UNROLL
        for (int i = 0; i < N; ++i) {
            HOP_UNROLL
            for (int half = 0; half < 2; ++half)
                _mm512_storeu_ps(sums + i * kBlock + half * kRows, _mm512_add_ps(c[i][half], more[i][half]));
        }
    }

    int quads_;
};
