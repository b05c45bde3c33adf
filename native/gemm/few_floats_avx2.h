// Few rows of floats times a panel of packed codes: decoded values stay in registers. The sums equal those computed
// from tiles bit for bit. Included in a namespace (isa.h), after numbers_avx2.h.

class FewFloats {
public:
    // Whether this class supports a product: codes whose block scales, if any, are for whole slices or for whole
    // fractions of a slice.
    static bool take(const Job& job, const uint8_t*) {
        const hop_operand& o = job.p.rhs;
        const int64_t ks = o.fold.ks;
        if (job.p.m > V::kFew) return false;
        if (o.format == HOP_UINT8 || o.format == HOP_E5M2 || (o.format == HOP_E4M3 && !has_subnormals())) return false;
        if (o.fold.format == HOP_NONE) return true;
        return o.format != HOP_UINT4 && !job.grouped() && job.p.k > 0 && job.p.k % kSlice == 0 && (ks % kSlice == 0 || (kSlice % ks == 0 && ks % 8 == 0));
    }

    // Multiplies `rows` rows of lhs by panel n into y (rows x 32): plain sums, or scaled sums of groups. Returns false
    // if a code is infinite or NaN, or a zero point of uint4 is above 127.
    static bool multiply(const Job& job, const uint8_t* lhs, const Side* sides, int64_t count, BlockScales& scales, BlockScales& folds,
                         int64_t n, float* y) {
        const Call call{job, reinterpret_cast<const float*>(lhs), sides, count, scales, folds, n, y};
        const hop_operand& o = job.p.rhs;
        bool done = true;
        if (o.format == HOP_INT4) by_rows<Columns<Bytes::signed_integers, true, false>, false>(call, done);
        else if (o.format == HOP_UINT4) by_rows<Columns<Bytes::signed_integers, true, true>, false>(call, done);
        else if (is_narrow(o.format)) by_rows<Columns<Bytes::signed_integers, true, true>, true>(call, done);
        else if (o.format == HOP_INT8) by_rows<Columns<Bytes::signed_integers, false, false>, false>(call, done);
        else if (o.fold.format == HOP_NONE) by_rows<Columns<Bytes::e4m3, false, false>, false>(call, done);
        else by_rows<Columns<Bytes::e4m3, false, false>, true>(call, done);
        return done;
    }

private:
    static constexpr int kPer = kRows / V::kLanes;  // vectors of a row of a tile

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
        in_row_blocks<V::kDecoded>(static_cast<int>(call.job.p.m), [&](auto rows, int first) {
            constexpr int N = rows.value, T = N <= V::kBoth ? 2 : 1;
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
        const V::Words table = V::table(bytes_of_codes(o.format));
        TilesOfPanel tiles(job, call.n);
        const float* a = call.lhs + first * kSlice;
        const int64_t a_stride = (job.p.m > kRows ? 2 : 1) * kTile;
        const bool grouped = job.grouped(), folds = o.fold.format != HOP_NONE;
        const int64_t ks = folds ? o.fold.ks : grouped ? job.group : kSlice;  // length of a run of k with the same scales
        const int run = ks < kSlice ? static_cast<int>(ks / 4) : kQuads;
        V::Words most = V::no_bits(), zeros[T][kPer] = {};  // each byte of `zeros` is the zero point of its code
        std::conditional_t<centered, GroupZeros<kPer * T>, NoZeros> of_groups(job, call.n * kBlock + tile * kRows);
        const auto load_group = [&](int64_t g) HOP_INLINED {
            if constexpr (centered) {
                if (g == job.groups) return;
                V::Words words[kPer * T];
                of_groups.at(g, words);
                most = most | in_bytes<T>(words, zeros);
            }
        };
        V::Reals c[T][N][kPer];
        alignas(64) float fold[T * kRows];
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
                    const V::Reals unit = V::all(unit_of(o.format));
                    for (int j = 0; j < T * kRows; j += V::kLanes) V::store(fold + j, found ? unit * V::load(found + j) : unit);
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
        if (centered ? V::any_bits(most) : Codes::kFloats && V::any_byte_from(most, decoder(o.format)->special)) return false;
        if (grouped && group < job.groups) add_group<N, T>(call, first, tile, group, c);
        if (grouped) return true;
        float* y = call.y + first * kBlock + tile * kRows;
        HOP_UNROLL
        for (int t = 0; t < T; ++t) {
            HOP_UNROLL
            for (int i = 0; i < N; ++i) {
                HOP_UNROLL
                for (int j = 0; j < kPer; ++j) V::store(y + i * kBlock + t * kRows + j * V::kLanes, c[t][i][j]);
            }
        }
        return true;
    }

    // Repeats each zero point four times. Returns bits of those that are not from 0 to 127.
    template <int T>
    HOP_INLINED static inline V::Words in_bytes(const V::Words (&words)[kPer * T], V::Words (&zeros)[T][kPer]) {
        V::Words wrong = V::no_bits();
        HOP_UNROLL
        for (int i = 0; i < kPer * T; ++i) {
            wrong = wrong | V::right(words[i], 7);
            zeros[i / kPer][i % kPer] = V::four_times(words[i]);
        }
        return wrong;
    }

    template <int N, int T>
    HOP_INLINED static inline void clear(V::Reals (&c)[T][N][kPer]) {
        HOP_UNROLL
        for (int t = 0; t < T; ++t) {
            HOP_UNROLL
            for (int i = 0; i < N; ++i) {
                HOP_UNROLL
                for (int j = 0; j < kPer; ++j) c[t][i][j] = V::zero();
            }
        }
    }

    // Like add_group of groups_plain.h; resets the sums to 0.
    template <int N, int T>
    HOP_INLINED static inline void add_group(const Call& call, int first, int tile, int64_t group, V::Reals (&c)[T][N][kPer]) {
        const bool scaled = call.job.p.lhs.scale.format != HOP_NONE;
        const Side& lhs = call.sides[call.count > 1 ? group : 0];
        const float* scale = call.scales.at(call.n * kBlock, group * call.job.group) + tile * kRows;
        float* y = call.y + first * kBlock + tile * kRows;
        HOP_UNROLL
        for (int t = 0; t < T; ++t) {
            HOP_UNROLL
            for (int i = 0; i < N; ++i) {
                HOP_UNROLL
                for (int j = 0; j < kPer; ++j) {
                    V::Reals x = c[t][i][j];
                    if (scaled) x = x * V::all(lhs.scale[first + i]);
                    x = x * V::load(scale + t * kRows + j * V::kLanes);
                    float* own = y + i * kBlock + t * kRows + j * V::kLanes;
                    V::store(own, V::load(own) + x);
                }
            }
        }
        clear<N, T>(c);
    }

    template <int N, int T, class Codes, bool Folded>
    HOP_INLINED static inline void products(const float* a, const uint8_t* b, const uint8_t* next, V::Words table,
                                            const V::Words (&zeros)[T][kPer], const float* fold, V::Words& most, V::Reals (&c)[T][N][kPer]) {
        Codes codes[T][kPer];
        HOP_UNROLL
        for (int t = 0; t < T; ++t) {
            HOP_UNROLL
            for (int j = 0; j < kPer; ++j) {
                codes[t][j] = Codes((t ? next : b) + j * V::kLanes * 4, table, zeros[t][j]);
                if (Codes::kFloats) most = V::larger_bytes(most, codes[t][j].bytes[0] & V::each_byte(127));
            }
        }
        HOP_UNROLL
        for (int k = 0; k < Codes::kCodes; ++k) {
            V::Reals w[T][kPer];
            HOP_UNROLL
            for (int t = 0; t < T; ++t) {
                HOP_UNROLL
                for (int j = 0; j < kPer; ++j) {
                    w[t][j] = codes[t][j].number(k);
                    if (Folded) w[t][j] = w[t][j] * V::load(fold + t * kRows + j * V::kLanes);
                }
            }
            HOP_UNROLL
            for (int i = 0; i < N; ++i) {
                const V::Reals x = V::all(a[i * kSlice + k]);
                HOP_UNROLL
                for (int t = 0; t < T; ++t) {
                    HOP_UNROLL
                    for (int j = 0; j < kPer; ++j) c[t][i][j] = V::plus_product(c[t][i][j], x, w[t][j]);
                }
            }
        }
    }
};
