// Engines whose instructions multiply two rows by two columns. Included in a namespace (isa.h), after skeleton_neon.h.
//
// Numbers defines the products of P pairs of rows and H times 8 columns, with four vectors of sums for a pair of rows
// and 8 columns, each [row][column]:
//
//     template <int P, int H> four(a, b, quad, sums)      multiplies four quads from `quad` on
//     columns(b, i)                                       the address of columns 8 i to 8 i + 7 of a panel
//     lhs_tile(tile, out)                                 interleaves pairs of rows
//
// Each sum is computed in the order of k, for any number of rows; a single row is paired with zeros or with another
// row.

template <class Numbers>
class Pairs : public Numbers {
public:
    using Sum = typename Numbers::Sum;
    using Vector = typename Numbers::Vector;
    using Numbers::kBytes;
    static constexpr int kLhsBytes = kBytes;
    static constexpr bool kFewRows = false, kKept = false;

    Pairs(int, int quads) : quads_(quads) {}

    template <int R, class Between>
    void multiply(const uint8_t* a, const uint8_t* b, int rows, int64_t slices, Sum* sums, bool add, Between& between) {
        blocks(rows, [&](auto pairs, auto halves, int first, int part) {
            const auto once = [&] { if (first == 0 && part == 0) between(); };
            block<pairs.value, halves.value>(a + first * kPair, R * kLhsBytes * kTile, b, part, slices, 0, kQuads,
                                             sums + first * 2 * kBlock + part * 8, add, once);
        });
    }

    template <int R, class Between>
    void step(const uint8_t* a, const uint8_t* b, int rows, int quad, Sum* sums, Between&) {
        blocks(rows, [&](auto pairs, auto halves, int first, int part) {
            block<pairs.value, halves.value>(a + first * kPair, 0, b, part, 1, quad, quads_,
                                             sums + first * 2 * kBlock + part * 8, false, [] {});
        });
    }

private:
    static constexpr int kMost = 6, kPair = 2 * kLhsBytes * kSlice;  // pairs of rows at a time; bytes of one pair

    // Few rows use 16 columns at once: fewer accumulators would be limited by latency.
    template <class Body>
    static void blocks(int rows, Body body) {
        in_row_blocks<kMost>((rows + 1) / 2, [&](auto pairs, int first) {
            constexpr int halves = pairs.value <= 3 ? 2 : 1;
            for (int part = 0; part < 4; part += halves) body(pairs, std::integral_constant<int, halves>(), first, part);
        });
    }

    template <int P, int H, class Between>
    static void block(const uint8_t* a, int64_t stride, const uint8_t* b, int part, int64_t slices, int quad, int quads,
                      Sum* sums, bool add, const Between& between) {
        Vector c[P][4 * H];
        HOP_UNROLL
        for (int i = 0; i < P; ++i) {
            HOP_UNROLL
            for (int j = 0; j < 2 * H; ++j) {
                c[i][2 * j] = c[i][2 * j + 1] = Vector{};
                if (add) turn(Numbers::load(row(sums, i, j)), Numbers::load(row(sums, i, j) + kBlock), c[i][2 * j], c[i][2 * j + 1]);
            }
        }
        const uint8_t* columns = Numbers::columns(b, part);
        for (; slices > 0; --slices, a += stride, columns += 2 * kBytes * kTile) {
            for (int q = quad; q < quad + quads; q += 4) Numbers::template four<P, H>(a, columns, q, c);
            between();
        }
        HOP_UNROLL
        for (int i = 0; i < P; ++i) {
            HOP_UNROLL
            for (int j = 0; j < 2 * H; ++j) {
                Vector first, second;
                turn(c[i][2 * j], c[i][2 * j + 1], first, second);
                Numbers::store(row(sums, i, j), first), Numbers::store(row(sums, i, j) + kBlock, second);
            }
        }
    }

    static Sum* row(Sum* sums, int pair, int four) { return sums + pair * 2 * kBlock + four * 4; }

    // Converts between vectors of four columns of one row and vectors of two columns of both rows.
    static void turn(Vector a, Vector b, Vector& first, Vector& second) {
        const uint64x2_t x = reinterpret_cast<uint64x2_t>(a), y = reinterpret_cast<uint64x2_t>(b);
        first = reinterpret_cast<Vector>(vzip1q_u64(x, y)), second = reinterpret_cast<Vector>(vzip2q_u64(x, y));
    }

    int quads_;
};
