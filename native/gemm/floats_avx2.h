// Float products in float32 with fused multiply-adds, with AVX2 or (V) wider vectors. Included in a namespace (isa.h),
// after numbers_avx2.h.
//
// A tile of rhs is [64][16 columns] floats, a tile of lhs is [16 rows][64]. Products are added one by one in the order
// of k, from the first k of the sum or of the group, so a sum depends neither on the other rows nor on the chunks.

class Floats {
public:
    using Sum = float;
    static constexpr int kBytes = 4, kLhsBytes = 4;
    static constexpr bool kFewRows = true, kKept = true;
    using Few = FewFloats;
    static constexpr int64_t kLongChunk = 32 << 10;

    Floats(int, int quads) : quads_(quads) {}

    static void lhs_slice(const Job& job, int64_t first, int rows, int64_t slice, uint8_t* out) {
        const int64_t rest = job.p.k - slice * kSlice;
        const int count = static_cast<int>(rest < kSlice ? rest : kSlice);
        for (int i = 0; i < rows; ++i)
            row_of_numbers(job, first + i, slice * kSlice, count, reinterpret_cast<float*>(out) + i * kSlice);
    }
    static void rhs_tile(const Job& job, BlockScales& folds, int64_t first, int64_t slice, uint8_t* out) {
        tile_of_numbers(job, folds, first, slice, reinterpret_cast<float*>(out));
    }

    template <int R, class Between>
    void multiply(const uint8_t* a, const uint8_t* b, int rows, int64_t slices, Sum* sums, bool add, Between& between) {
        // Groups are kept in registers, without other work between products.
        if constexpr (std::is_same<Between, Ahead>::value) multiplied(a, b, R * kTile, rows, slices, sums, add, between);
    }

    template <int R, class Between>
    void step(const uint8_t*, const uint8_t*, int, int, Sum*, Between&) {}  // not used: groups are kept in registers

    static bool keeps(const Job& job) { return job.grouped(); }

    // Like add_group of groups_plain.h: each operation is rounded, and groups are added in order.
    template <class Between>
    void groups(const Job& job, const KeptGroups& g, int rows, Between& between) {
        const bool scaled = job.p.lhs.scale.format != HOP_NONE;
        blocks(rows, [&](auto n, auto tiles, int first, int tile) {
            constexpr int N = n.value, T = tiles.value;
            const Once<Between> once{between, first == 0 && tile == 0};
            const auto* left = reinterpret_cast<const float*>(g.a) + first * kSlice;
            const auto* right = reinterpret_cast<const float*>(g.b) + tile * kTile;
            float* const y = g.y + first * kBlock + tile * kRows;
            int64_t slices = g.slices;
            int quad = 0;
            if (g.first) clear_rows(y, N, T);
            for (int64_t group = 0; group < g.groups; ++group) {
                V::Reals c[N][kPer * T];
                each_pair<N, kPer * T>([&](auto i, auto j) HOP_INLINED { c[i][j] = V::zero(); });
                for (int64_t of_group = slices < g.span ? slices : g.span; of_group > 0; --of_group) {
                    add_products<N, T>(left + quad * 4, right + quad * 4 * kRows, g.quads * 4, c);
                    quad += g.quads;
                    if (quad == kQuads) quad = 0, --slices, left += g.stride / sizeof(float), right += 2 * kTile;
                }
                const float *row_scale = g.lhs[group * g.lhs_step].scale + first, *scale = g.rhs[group].scale + tile * kRows;
                each_pair<N, kPer * T>([&](auto i, auto j) HOP_INLINED {
                    V::Reals x = c[i][j];
                    if (scaled) x = x * V::all(row_scale[i]);
                    x = x * V::load(scale + j * kLanes);
                    float* own = y + i * kBlock + j * kLanes;
                    V::store(own, V::load(own) + x);
                });
                once();
            }
        });
    }

private:
    template <class Between>
    static void multiplied(const uint8_t* a, const uint8_t* b, int64_t stride, int rows, int64_t slices, Sum* sums, bool add, Between& between) {
        blocks(rows, [&](auto n, auto tiles, int first, int tile) {
            constexpr int N = n.value, T = tiles.value;
            const Once<Between> once{between, first == 0 && tile == 0};
            const auto* left = reinterpret_cast<const float*>(a) + first * kSlice;
            const auto* right = reinterpret_cast<const float*>(b) + tile * kTile;
            Sum* own = sums + first * kBlock + tile * kRows;
            V::Reals c[N][kPer * T];
            each_pair<N, kPer * T>([&](auto i, auto j) HOP_INLINED { c[i][j] = add ? V::load(own + i * kBlock + j * kLanes) : V::zero(); });
            for (int64_t s = 0; s < slices; ++s, left += stride, right += 2 * kTile) {
                add_products<N, T>(left, right, kSlice, c);
                once();
            }
            each_pair<N, kPer * T>([&](auto i, auto j) HOP_INLINED { V::store(own + i * kBlock + j * kLanes, c[i][j]); });
        });
    }

    static constexpr int kLanes = V::kLanes, kPer = kRows / kLanes;  // vectors of a row of a tile

    template <class Body>
    static void blocks(int rows, Body body) {
        for (int tile = 0; tile < 2; ++tile)
            in_row_blocks<V::kMost>(rows, [&](auto n, int first) {
                constexpr int tiles = n.value <= V::kBoth ? 2 : 1;
                if (tile == 0 || tiles == 1) body(n, std::integral_constant<int, tiles>(), first, tile);
            });
    }

    // Adds products of N rows, one slice apart, and `count` (a multiple of 4) k of T adjacent tiles.
    template <int N, int T>
    HOP_INLINED static inline void add_products(const float* a, const float* b, int count, V::Reals (&c)[N][kPer * T]) {
        for (int k = 0; k < count; k += 4, a += 4, b += 4 * kRows)
            each<4>([&](auto at) HOP_INLINED {
                V::Reals w[kPer * T];
                each<kPer * T>([&](auto j) HOP_INLINED { w[j] = V::load(b + at * kRows + j / kPer * kTile + j % kPer * kLanes); });
                each<N>([&](auto i) HOP_INLINED {
                    const V::Reals x = V::all(a[i * kSlice + at]);
                    each<kPer * T>([&](auto j) HOP_INLINED { c[i][j] = V::plus_product(c[i][j], x, w[j]); });
                });
            });
    }

    int quads_;
};
