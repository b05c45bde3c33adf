// Engines whose instructions multiply four values of a row, one per lane, by those of four columns. Included in a
// namespace (isa.h), after skeleton_neon.h.
//
// Numbers defines the products of N rows and T tiles of 16 columns, with kVectors vectors of sums for a row of a tile:
//
//     template <int N, int T> four(a, b, quad, sums)      multiplies four quads from `quad` on
//     begin(from, add, sums), end(to, add, sums)          loads the sums of a row if `add`, and stores them
//
// Each sum is computed in the order of k, for any number of rows.

template <class Numbers>
class Lanes : public Numbers {
public:
    using Sum = typename Numbers::Sum;
    using Vector = typename Numbers::Vector;
    using Numbers::kBytes, Numbers::kLhsBytes, Numbers::kMost, Numbers::kVectors;
    static constexpr bool kFewRows = false, kKept = false;

    Lanes(int, int quads) : quads_(quads) {}

    template <int R, class Between>
    void multiply(const uint8_t* a, const uint8_t* b, int rows, int64_t slices, Sum* sums, bool add, Between& between) {
        blocks(rows, [&](auto n, auto tiles, int first, int tile) {
            const auto once = [&] { if (first == 0 && tile == 0) between(); };
            block<n.value, tiles.value>(a + first * kRow, R * kLhsBytes * kTile, b + tile * kBytes * kTile, slices, 0, kQuads,
                                        sums + first * kBlock + tile * kRows, add, once);
        });
    }

    template <int R, class Between>
    void step(const uint8_t* a, const uint8_t* b, int rows, int quad, Sum* sums, Between&) {
        blocks(rows, [&](auto n, auto tiles, int first, int tile) {
            block<n.value, tiles.value>(a + first * kRow, 0, b + tile * kBytes * kTile, 1, quad, quads_,
                                        sums + first * kBlock + tile * kRows, false, [] {});
        });
    }

private:
    static constexpr int kRow = kLhsBytes * kSlice, kRegisters = 24;  // bytes of a row; accumulator registers

    // Few rows use both tiles at once: fewer accumulators would be limited by latency.
    template <class Body>
    static void blocks(int rows, Body body) {
        in_row_blocks<kMost>(rows, [&](auto n, int first) {
            constexpr int tiles = n.value * 2 * kVectors <= kRegisters ? 2 : 1;
            for (int tile = 0; tile < 2; tile += tiles) body(n, std::integral_constant<int, tiles>(), first, tile);
        });
    }

    template <int N, int T, class Between>
    static void block(const uint8_t* a, int64_t stride, const uint8_t* b, int64_t slices, int quad, int quads,
                      Sum* sums, bool add, const Between& between) {
        Vector c[N][T * kVectors];
        HOP_UNROLL
        for (int i = 0; i < N; ++i) Numbers::begin(sums + i * kBlock, add, c[i]);
        for (; slices > 0; --slices, a += stride, b += 2 * kBytes * kTile) {
            for (int q = quad; q < quad + quads; q += 4) Numbers::template four<N, T>(a, b, q, c);
            between();
        }
        HOP_UNROLL
        for (int i = 0; i < N; ++i) Numbers::end(sums + i * kBlock, add, c[i]);
    }

    int quads_;
};

// Sums with the same layout in vectors and in memory.
inline int32x4_t load_sum(const int32_t* p) { return vld1q_s32(p); }
inline float32x4_t load_sum(const float* p) { return vld1q_f32(p); }
inline void store_sum(int32_t* p, int32x4_t x) { vst1q_s32(p, x); }
inline void store_sum(float* p, float32x4_t x) { vst1q_f32(p, x); }

template <class V, int Count, class Sum>
inline void load_sums(const Sum* from, bool add, V (&sums)[Count]) {
    HOP_UNROLL
    for (int i = 0; i < Count; ++i) sums[i] = add ? load_sum(from + 4 * i) : V{};
}

template <class V, int Count, class Sum>
inline void store_sums(Sum* to, const V (&sums)[Count]) {
    HOP_UNROLL
    for (int i = 0; i < Count; ++i) store_sum(to + 4 * i, sums[i]);
}
