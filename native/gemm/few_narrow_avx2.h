// Few rows times 4-bit codes, with AVX2. Included in a namespace (isa.h), after narrow_avx2.h.

// Few rows times a panel of codes; decoded codes stay in registers.
class FewNarrow {
public:
    static constexpr int kMost = 4;  // more rows are faster with tiles

    // Requires known column sums if the sums run over all k.
    static bool take(const Job& job, const uint8_t*) {
        if (job.p.m > kMost) return false;
        if (!lhs_has_zero(job)) return !job.grouped() || are_paired(job);
        return job.grouped() ? are_paired(job) && job.p.k % kSlice == 0 : knows_sums(job);
    }

    // Computes y (rows x 32): plain sums, or scaled sums of groups.
    static bool multiply(const Job& job, const uint8_t* lhs, const Side* sides, int64_t count, BlockScales& scales, BlockScales&, int64_t n, float* y) {
        in_row_blocks<kMost>(static_cast<int>(job.p.m), [&](auto rows, int) {
            constexpr int N = rows.value, T = N <= 2 ? 2 : 1;
            for (int tile = 0; tile < 2; tile += T) {
                if (job.grouped() && lhs_has_zero(job)) columns<N, T, true>(job, lhs, sides, count, scales, n, tile, y);
                else columns<N, T, false>(job, lhs, sides, count, scales, n, tile, y);
            }
        });
        return true;
    }

private:
    // Multiplies N rows by the 16 columns of each of T tiles; with `Summed` also sums the columns' codes.
    template <int N, int T, bool Summed>
    static void columns(const Job& job, const uint8_t* a, const Side* sides, int64_t count, BlockScales& scales, int64_t n, int tile, float* y) {
        constexpr int M = 2 * T;  // vectors of columns
        const hop_operand& o = job.p.rhs;
        TilesOfPanel tiles(job, n);
        const __m256i nibble = _mm256_set1_epi8(15), turned = _mm256_set1_epi8(job.rhs_shift ? static_cast<char>(0x88) : 0);
        const __m256i shift = _mm256_set1_epi32(job.rhs_shift), none = _mm256_setzero_si256();
        GroupZeros<M> zeros(job, n * kBlock + tile * kRows);
        const bool grouped = job.grouped();
        const int run = grouped && job.group < kSlice / 2 ? static_cast<int>(job.group / 4) : kWidened;
        const __m256i ones = kept_ones();
        __m256i c[N][M], sum[Summed ? M : 1];
        const auto clear = [&]() HOP_INLINED {
            each_pair<N, M>([&](auto i, auto j) HOP_INLINED { c[i][j] = _mm256_setzero_si256(); });
            each<Summed ? M : 0>([&](auto j) HOP_INLINED { sum[j] = _mm256_setzero_si256(); });
        };
        Ahead next_scales = rows_ahead(job, o.scale, tile == 0 && grouped ? job.rhs.scale : nullptr, n * kBlock, 4);
        Ahead next_zeros = rows_ahead(job, o.scale, tile == 0 && grouped && o.zero_format != HOP_NONE ? job.rhs.zero : nullptr, n * kBlock, 1);
        int64_t group = 0, left = job.group;
        const auto add_group = [&]() HOP_INLINED {
            next_scales(), next_zeros();
            __m256i of_columns[M];
            zeros.at(group, of_columns);
            const Side& of_rows = sides[count > 1 ? group : 0];
            const float* scale = scales.at(n * kBlock, group * job.group) + tile * kRows;
            const __m256i terms = _mm256_set1_epi32(static_cast<int32_t>(job.terms(group)));
            each<M>([&](auto j) HOP_INLINED {
                const __m256i zero = _mm256_add_epi32(of_columns[j], shift);
                __m256i pair = _mm256_slli_epi32(_mm256_sub_epi32(none, zero), 16);  // like pair_column
                if (Summed) {
                    const __m256i rest = _mm256_sub_epi32(_mm256_mullo_epi32(terms, zero), sum[j]);
                    pair = _mm256_or_si256(pair, _mm256_and_si256(rest, _mm256_set1_epi32(0xffff)));
                }
                each<N>([&](auto i) HOP_INLINED {
                    const __m256i own = _mm256_add_epi32(c[i][j], _mm256_madd_epi16(_mm256_set1_epi32(of_rows.pair[i]), pair));
                    add_scaled(own, of_rows.scale[i], _mm256_loadu_ps(scale + j * 8), y + i * kBlock + tile * kRows + j * 8);
                });
            });
            clear();
            left = job.group, ++group;
        };
        clear();
        if (grouped) clear_rows(y + tile * kRows, N, T);
        for (int64_t s = 0; s < job.slices; ++s, a += kTile) {
            const uint8_t* b = tiles.at(s, tile, T);
            for (int quad = 0; quad < kQuads && group < job.groups;) {
                __m256i part[N][M], own[Summed ? M : 1];
                each_pair<N, M>([&](auto i, auto j) HOP_INLINED { part[i][j] = _mm256_setzero_si256(); });
                each<Summed ? M : 0>([&](auto j) HOP_INLINED { own[j] = _mm256_setzero_si256(); });
                for (const int end = quad + run; quad < end; quad += 2) {
                    const uint8_t* at = b + quad * 32;
                    if (tile == 0) tiles.fetch(b, quad / 2);
                    each<M>([&](auto j) HOP_INLINED {
                        const __m256i x = _mm256_xor_si256(load256(at + j / 2 * (kTile / 2) + j % 2 * 32), turned);
                        const __m256i low = _mm256_and_si256(x, nibble), high = _mm256_and_si256(_mm256_srli_epi16(x, 4), nibble);
                        if (Summed) own[j] = _mm256_add_epi8(own[j], _mm256_add_epi8(low, high));
                        each<N>([&](auto i) HOP_INLINED {
                            const uint8_t* row = a + i * kSlice + quad * 4;
                            add_products(part[i][j], low, four_codes(row));
                            add_products(part[i][j], high, four_codes(row + 4));
                        });
                    });
                }
                each_pair<N, M>([&](auto i, auto j) HOP_INLINED { c[i][j] = _mm256_add_epi32(c[i][j], in_int32(part[i][j], ones)); });
                each<Summed ? M : 0>([&](auto j) HOP_INLINED {
                    sum[j] = _mm256_add_epi32(sum[j], _mm256_madd_epi16(_mm256_maddubs_epi16(own[j], _mm256_set1_epi8(1)), ones));
                });
                if (grouped && (left -= run * 4) <= 0) add_group();
            }
        }
        if (grouped && group < job.groups) add_group();
        if (grouped) return;
        auto* sums = reinterpret_cast<int32_t*>(y) + tile * kRows;
        each_pair<N, M>([&](auto i, auto j) HOP_INLINED { _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + i * kBlock + j * 8), c[i][j]); });
    }
};

class NarrowOrFew : public Narrow {
public:
    using Narrow::Narrow;
    using Few = FewNarrow;
    static constexpr bool kFewRows = true;
};
