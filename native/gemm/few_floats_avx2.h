// Few rows of floats times a panel of packed codes: decoded values stay in registers. The sums equal those computed
// from tiles bit for bit. Included in a namespace (isa.h), after numbers_avx2.h.

class FewFloats {
public:
    // Whether this class supports a product: codes whose block scales, if any, are for whole slices or for whole
    // fractions of a slice.
    static bool take(const Job& job, const uint8_t*) {
        const hop_operand& o = job.p.rhs;
        const int64_t ks = o.fold.ks;
        if (job.p.m > kMost) return false;
        if (o.format == HOP_UINT8 || o.format == HOP_E5M2 || (o.format == HOP_E4M3 && !has_subnormals())) return false;
        if (o.fold.format == HOP_NONE) return true;
        return o.format != HOP_UINT4 && !job.grouped() && job.p.k % kSlice == 0 && (ks % kSlice == 0 || (kSlice % ks == 0 && ks % 8 == 0));
    }

    // Multiplies `rows` rows of lhs by panel n into y (rows x 32): plain sums, or scaled sums of groups. Returns false
    // if a code is infinite or NaN, or a zero point of uint4 is above 127.
    static bool multiply(const Job& job, const uint8_t* lhs, const Side* sides, int64_t count, BlockScales& scales, BlockScales& folds,
                         int64_t n, float* y) {
        const Call call{job, reinterpret_cast<const float*>(lhs), sides, count, scales, folds, n, y};
        const hop_operand& o = job.p.rhs;
        bool done = true;
        if (o.format == HOP_INT4) by_rows<Eight<Bytes::signed_integers, true, false>, false>(call, done);
        else if (o.format == HOP_UINT4) by_rows<Eight<Bytes::signed_integers, true, true>, false>(call, done);
        else if (is_narrow(o.format)) by_rows<Eight<Bytes::signed_integers, true, true>, true>(call, done);
        else if (o.format == HOP_INT8) by_rows<Eight<Bytes::signed_integers, false, false>, false>(call, done);
        else if (o.fold.format == HOP_NONE) by_rows<Eight<Bytes::e4m3, false, false>, false>(call, done);
        else by_rows<Eight<Bytes::e4m3, false, false>, true>(call, done);
        return done;
    }

private:
    static constexpr int kMost = 4;  // more rows are faster with tiles

    struct Call {
        const Job& job;
        const float* lhs;
        const Side* sides;
        int64_t count;  // number of sides: 1 if all groups have the same
        BlockScales &scales, &folds;
        int64_t n;
        float* y;
    };

    template <class Codes, bool Folded>
    static void by_rows(const Call& call, bool& done) {
        in_row_blocks<kMost>(static_cast<int>(call.job.p.m), [&](auto rows, int first) {
            constexpr int N = rows.value, T = N <= 2 ? 2 : 1;
            for (int tile = 0; tile < 2; tile += T) done = done && columns<N, T, Codes, Folded>(call, first, tile);
        });
    }

    // Multiplies N rows by the 16 columns of each of T tiles.
    template <int N, int T, class Codes, bool Folded>
    static bool columns(const Call& call, int first, int tile) {
        constexpr int each = Codes::kCodes / 4, bytes = kTile / each;  // quads at a time; bytes of a tile
        constexpr bool centered = Codes::kTable && !Folded;              // whether codes have zero points
        const Job& job = call.job;
        const hop_operand& o = job.p.rhs;
        const __m256i table = table_of(o.format);
        TilesOfPanel tiles(job, call.n);
        const float* a = call.lhs + first * kSlice;
        const int64_t a_stride = (job.p.m > kRows ? 2 : 1) * kTile;
        const bool grouped = job.grouped(), folds = o.fold.format != HOP_NONE;
        const int64_t ks = folds ? o.fold.ks : grouped ? job.group : kSlice;  // length of a run of k with the same scales
        const int run = ks < kSlice ? static_cast<int>(ks / 4) : kQuads;
        __m256i most = _mm256_setzero_si256(), zeros[T][2] = {};  // each byte of `zeros` is the zero point of its code
        std::conditional_t<centered, GroupZeros<2 * T>, NoZeros> of_groups(job, call.n * kBlock + tile * kRows);
        const auto load_group = [&](int64_t g) HOP_INLINED {
            if constexpr (centered) {
                if (g == job.groups) return;
                __m256i words[2 * T];
                of_groups.at(g, words);
                most = _mm256_or_si256(most, in_bytes<T>(words, zeros));
            }
        };
        __m256 c[T][N][2];
        alignas(32) float fold[T * kRows];
        clear<N, T>(c);
        if (grouped) clear_rows(call.y + first * kBlock + tile * kRows, N, T);
        Ahead next_scales = rows_ahead(job, o.scale, tile == 0 && grouped ? job.rhs.scale : nullptr, call.n * kBlock, 4);
        Ahead next_folds = rows_ahead(job, o.fold, tile == 0 ? job.rhs.fold : nullptr, call.n * kBlock, o.fold.format == HOP_FLOAT32 ? 4 : 1);
        Ahead next_zeros = rows_ahead(job, o.scale, centered && tile == 0 && grouped ? job.rhs.zero : nullptr, call.n * kBlock, 1);
        int64_t group = 0, left = job.group;  // remaining k of the group
        load_group(0);
        for (int64_t s = 0; s < job.slices; ++s, a += a_stride) {
            const uint8_t* b = tiles.at(s, tile, T);
            for (int quad = 0; quad < kQuads && group < job.groups;) {
                if (Folded) {
                    next_folds();
                    const float* found = folds ? call.folds.at(call.n * kBlock, s * kSlice + quad * 4) + tile * kRows : nullptr;
                    const __m256 unit = _mm256_set1_ps(unit_of(o.format));
                    for (int j = 0; j < T * kRows; j += 8) _mm256_store_ps(fold + j, found ? _mm256_mul_ps(unit, _mm256_loadu_ps(found + j)) : unit);
                }
                for (const int end = quad + run; quad < end; quad += each) {
                    const uint8_t* at = b + quad / each * 64;
                    if (tile == 0) tiles.fetch(b, quad / each);
                    products<N, T, Codes, Folded>(a + quad * 4, at, at + (T - 1) * bytes, table, zeros, fold, most, c);
                }
                if (!grouped || (left -= run * 4) > 0) continue;
                next_scales(), next_zeros();
                add_group<N, T>(call, first, tile, group++, c);
                load_group(group);
                left = job.group;
            }
        }
        if (centered ? _mm256_movemask_epi8(most) != 0 : special_below<Codes>(o, most)) return false;
        if (grouped && group < job.groups) add_group<N, T>(call, first, tile, group, c);
        if (grouped) return true;
        float* y = call.y + first * kBlock + tile * kRows;
        HOP_UNROLL
        for (int t = 0; t < T; ++t) {
            HOP_UNROLL
            for (int i = 0; i < N; ++i) {
                HOP_UNROLL
                for (int half = 0; half < 2; ++half) _mm256_storeu_ps(y + i * kBlock + t * kRows + half * 8, c[t][i][half]);
            }
        }
        return true;
    }

    // Repeats each zero point four times. Returns a byte above 127 for each that is not from 0 to 127.
    template <int T>
    HOP_INLINED static inline __m256i in_bytes(const __m256i (&words)[2 * T], __m256i (&zeros)[T][2]) {
        __m256i wrong = _mm256_setzero_si256();
        HOP_UNROLL
        for (int i = 0; i < 2 * T; ++i) {
            const __m256i beyond = _mm256_cmpgt_epi32(_mm256_srli_epi32(words[i], 7), _mm256_setzero_si256());
            wrong = _mm256_or_si256(wrong, beyond);
            zeros[i / 2][i % 2] = _mm256_mullo_epi32(words[i], _mm256_set1_epi32(0x01010101));
        }
        return wrong;
    }

    // Whether a byte was infinite or NaN, from the largest magnitudes.
    template <class Codes>
    static bool special_below(const hop_operand& o, __m256i most) {
        if (!Codes::kFloats) return false;
        const __m256i special = _mm256_set1_epi8(static_cast<char>(decoder(o.format)->special));
        return _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(most, special), most)) != 0;
    }

    template <int N, int T>
    HOP_INLINED static inline void clear(__m256 (&c)[T][N][2]) {
        HOP_UNROLL
        for (int t = 0; t < T; ++t) {
            HOP_UNROLL
            for (int i = 0; i < N; ++i) c[t][i][0] = c[t][i][1] = _mm256_setzero_ps();
        }
    }

    // Like add_group of groups_plain.h; resets the sums to 0.
    template <int N, int T>
    HOP_INLINED static inline void add_group(const Call& call, int first, int tile, int64_t group, __m256 (&c)[T][N][2]) {
        const bool scaled = call.job.p.lhs.scale.format != HOP_NONE;
        const Side& lhs = call.sides[call.count > 1 ? group : 0];
        const float* scale = call.scales.at(call.n * kBlock, group * call.job.group) + tile * kRows;
        float* y = call.y + first * kBlock + tile * kRows;
        HOP_UNROLL
        for (int t = 0; t < T; ++t) {
            HOP_UNROLL
            for (int i = 0; i < N; ++i) {
                HOP_UNROLL
                for (int half = 0; half < 2; ++half) {
                    __m256 x = c[t][i][half];
                    if (scaled) x = _mm256_mul_ps(x, _mm256_set1_ps(lhs.scale[first + i]));
                    x = _mm256_mul_ps(x, _mm256_loadu_ps(scale + t * kRows + half * 8));
                    float* own = y + i * kBlock + t * kRows + half * 8;
                    _mm256_storeu_ps(own, _mm256_add_ps(_mm256_loadu_ps(own), x));
                }
            }
        }
        clear<N, T>(c);
    }

    template <int N, int T, class Codes, bool Folded>
    HOP_INLINED static inline void products(const float* a, const uint8_t* b, const uint8_t* next, __m256i table,
                                            const __m256i (&zeros)[T][2], const float* fold, __m256i& most, __m256 (&c)[T][N][2]) {
        constexpr int last = T - 1;
        const __m256i magnitude = _mm256_set1_epi8(127);
        const Codes codes[2][2] = {{{b, table, zeros[0][0]}, {b + 32, table, zeros[0][1]}},
                                   {{next, table, zeros[last][0]}, {next + 32, table, zeros[last][1]}}};
        HOP_UNROLL
        for (int j = 0; Codes::kFloats && j < 2 * T; ++j)
            most = _mm256_max_epu8(most, _mm256_and_si256(codes[j / 2][j % 2].bytes[0], magnitude));
        HOP_UNROLL
        for (int k = 0; k < Codes::kCodes; ++k) {
            __m256 w[T][2];
            HOP_UNROLL
            for (int t = 0; t < T; ++t) {
                HOP_UNROLL
                for (int half = 0; half < 2; ++half) {
                    w[t][half] = codes[t][half].number(k);
                    if (Folded) w[t][half] = _mm256_mul_ps(w[t][half], _mm256_load_ps(fold + t * kRows + half * 8));
                }
            }
            HOP_UNROLL
            for (int i = 0; i < N; ++i) {
                const __m256 x = _mm256_set1_ps(a[i * kSlice + k]);
                HOP_UNROLL
                for (int t = 0; t < T; ++t) {
                    HOP_UNROLL
                    for (int half = 0; half < 2; ++half) c[t][i][half] = _mm256_fmadd_ps(x, w[t][half], c[t][i][half]);
                }
            }
        }
    }
};
