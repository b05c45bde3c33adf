// Few rows times a panel of packed codes in groups: decoded values stay in registers. Included in a namespace (isa.h),
// after gemm.h; codes_of_groups_avx512.h computes the sums of a group.

// The zero points of 32 rows, group by group along k, one byte each; computed for many groups at a time.
class GroupZeros {
public:
    GroupZeros(const hop_operand& o, const void* data, int64_t rows, int64_t groups)
        : o_(o), data_(static_cast<const uint8_t*>(data)), rows_(rows), groups_(groups) {}

    // Zero points of rows first..first + 31 in groups begin..begin + kWindow - 1, 32 bytes for each group.
    HOP_ALONE const uint8_t* at(int64_t first, int64_t begin) {
        const int64_t count = groups_ - begin < kWindow ? groups_ - begin : kWindow;
        const int64_t rest = rows_ - first, rows = rest < kBlock ? rest : kBlock;
        if (o_.zero_format == HOP_NONE) {
            std::memset(window_, static_cast<uint8_t>(o_.zero), sizeof(window_));
        } else if (o_.scale.rows == 1 && o_.scale.k_stride == 1) {
            for (int half = 0; half < 2; ++half) part(first + half * kRows, rows - half * kRows, begin, count, half);
        } else {
            for (int64_t g = 0; g < count; ++g) {
                int32_t zeros[kBlock] = {};
                load_zeros(o_, data_, first, rows, (begin + g) * o_.scale.ks, zeros);
                for (int i = 0; i < kBlock; ++i) window_[g * kBlock + i] = static_cast<uint8_t>(zeros[i]);
            }
        }
        return window_;
    }

    // Whether all zero points computed last are below 16.
    HOP_ALONE bool are_small() const {
        __m512i any = load512(window_);
        for (int i = 64; i < kWindow * kBlock; i += 64) any = _mm512_or_si512(any, load512(window_ + i));
        return _mm512_test_epi8_mask(any, _mm512_set1_epi8(static_cast<char>(0xf0))) == 0;
    }

    static constexpr int64_t kWindow = BlockScales::kWindow;

private:
    HOP_ALONE void part(int64_t first, int64_t rows, int64_t begin, int64_t count, int half) {
        uint8_t own[kTile], tile[kTile];
        const uint8_t* from = data_ + first * o_.scale.row_stride + begin;
        int64_t stride = o_.scale.row_stride;
        if (rows < kRows || count < kSlice) {
            std::memset(own, 0, sizeof(own));
            for (int64_t i = 0; i < rows && i < kRows; ++i) std::memcpy(own + i * kSlice, from + i * stride, static_cast<size_t>(count));
            from = own, stride = kSlice;
        }
        tile_from_rows(from, stride, tile);
        alignas(64) uint8_t order[64];
        for (int i = 0; i < 64; ++i) order[i] = static_cast<uint8_t>(i % kRows * 4 + i / kRows);
        for (int quad = 0; quad < kQuads; ++quad) {  // 4 groups
            const __m512i x = _mm512_permutexvar_epi8(load512(order), load512(tile + quad * 64));
            uint8_t* out = window_ + quad * 4 * kBlock + half * kRows;
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_castsi512_si128(x));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + kBlock), _mm512_extracti32x4_epi32(x, 1));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * kBlock), _mm512_extracti32x4_epi32(x, 2));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 3 * kBlock), _mm512_extracti32x4_epi32(x, 3));
        }
    }

    const hop_operand& o_;
    const uint8_t* data_;
    int64_t rows_, groups_;
    alignas(64) uint8_t window_[kWindow * kBlock] = {};
};

// The operands of a group's sums: quads `quad` to `end` of each of `slices` slices, zero points and the number of
// terms.
struct GroupCodes {
    const uint8_t *a, *b;
    int64_t stride, slices;  // stride: bytes between slices of `a`
    int quad, end;
    const uint8_t* zero;  // one per column
    const int32_t* pair;  // one per row
    int32_t terms;
};

template <class Numbers>
struct FewGroups {
    static constexpr int kTogether = 6;  // rows whose sums fit in the registers

    static bool take(const Job& job, const uint8_t*) {
        const hop_operand& o = job.p.rhs;
        if (has_zero(o) && (o.format != HOP_UINT4 || o.zero_format == HOP_INT8 || o.zero < 0 || o.zero > 15)) return false;
        const int64_t most = is_narrow(o.format) ? kBlock : kBlock / 2;  // for more rows, codes are converted to tiles once
        return job.p.m <= most && o.layout == HOP_TILED && o.format != HOP_UINT8 && o.fold.format == HOP_NONE &&
               keeps_groups(job) && o.scale.ks == job.group;
    }

    // Computes y (rows x 32), as kept_groups does, bit for bit. Returns false if a zero point needs the general path.
    static bool multiply(const Job& job, const uint8_t* lhs, const Side* lhs_sides, int64_t sides, BlockScales& scales,
                         BlockScales&, int64_t n, float* y) {
        bool done = true;
        in_row_blocks<kTogether>(static_cast<int>(job.p.m), [&](auto rows, int first) {
            constexpr int N = rows.value;
            const Rows of{lhs, lhs_sides, sides, first};
            if (!is_narrow(job.p.rhs.format)) {
                if (decoder(job.p.rhs.format)->codes == 128) panel<N, typename Numbers::template Bytes<N, 128>>(job, of, scales, n, y);
                else panel<N, typename Numbers::template Bytes<N, 256>>(job, of, scales, n, y);
            } else if (has_zero(job.p.rhs)) {
                done = done && panel<N, typename Numbers::template Narrow<N, true>>(job, of, scales, n, y);
            } else {
                panel<N, typename Numbers::template Narrow<N, false>>(job, of, scales, n, y);
            }
        });
        return done;
    }

private:
    struct Rows {
        const uint8_t* tiles;
        const Side* sides;
        int64_t count;  // number of sides: 1 if all groups have the same
        int first;
    };

    template <int N, class Codes>
    static bool panel(const Job& job, const Rows& rows, BlockScales& scales, int64_t n, float* out) {
        constexpr int64_t tiles = 2 * Codes::kTileBytes;
        const int64_t stride = (job.p.m > kRows ? 2 : 1) * Numbers::kLhsBytes * kTile;
        const Codes codes(job.p.rhs.format);
        const int64_t first = n * kBlock, span = ceil_div(job.group, kSlice);
        const int quads = job.group < kSlice ? static_cast<int>(job.group / 4) : kQuads;
        GroupZeros zeros(job.p.rhs, job.rhs.zero, job.p.n, job.groups);
        GroupCodes g{rows.tiles + rows.first * Numbers::kLhsBytes * kSlice, tile_in_panel(job.p.rhs, job.rhs.codes, job.p.k, first, 0),
                     stride, span, 0, quads, nullptr, nullptr, 0};
        int64_t slices = job.slices;
        const bool once = rows.first == 0;
        // Later row blocks find the codes that the first one read in the cache, so memory bandwidth is free for the
        // next panel.
        const int64_t size = job.slices * tiles;
        Ahead next_codes(job.p.m > kTogether ? g.b + size + size * rows.first / job.p.m : nullptr, size * N / job.p.m, job.groups);
        Ahead next_scales = rows_ahead(job, job.p.rhs.scale, once ? job.rhs.scale : nullptr, first, 4);
        Ahead next_zeros = rows_ahead(job, job.p.rhs.scale, once && Codes::kZero ? job.rhs.zero : nullptr, first, 1);
        out += rows.first * kBlock;
        __m512 y[N][2];
        HOP_UNROLL
        for (int i = 0; i < N; ++i) y[i][0] = y[i][1] = _mm512_set1_ps(-0.f);  // -0 + x is x, for each x
        for (int64_t begin = 0; begin < job.groups; begin += GroupZeros::kWindow) {
            const int64_t count = job.groups - begin < GroupZeros::kWindow ? job.groups - begin : GroupZeros::kWindow;
            const float* scale = scales.at(first, begin * job.group);
            if (Codes::kZero) {
                g.zero = zeros.at(first, begin);
                if (Numbers::kBytes != 1 && !zeros.are_small()) return false;
            }
            for (int64_t i = begin; i < begin + count; ++i, scale += kBlock, g.zero += Codes::kZero ? kBlock : 0) {
                const Side& lhs = rows.sides[rows.count > 1 ? i : 0];
                g.pair = lhs.pair + rows.first;
                g.terms = static_cast<int32_t>(job.terms(i));
                if (g.slices > slices) g.slices = slices;
                next_codes(), next_scales(), next_zeros();
                typename Numbers::Vector c[N][2];
                codes.sums(g, c);
                HOP_UNROLL
                for (int row = 0; row < N; ++row) {
                    HOP_UNROLL
                    for (int half = 0; half < 2; ++half) {
                        const __m512 x = _mm512_mul_ps(Numbers::number(c[row][half]), _mm512_set1_ps(lhs.scale[rows.first + row]));
                        y[row][half] = _mm512_add_ps(y[row][half], _mm512_mul_ps(x, _mm512_load_ps(scale + half * kRows)));
                    }
                }
                if (g.end < kQuads) {
                    g.quad = g.end, g.end += quads;
                } else {
                    g.quad = 0, g.end = quads, slices -= g.slices;
                    g.a += g.slices * stride, g.b += g.slices * tiles;
                }
            }
        }
        HOP_UNROLL
        for (int row = 0; row < N; ++row) {
            HOP_UNROLL
            for (int half = 0; half < 2; ++half) _mm512_storeu_ps(out + row * kBlock + half * kRows, y[row][half]);
        }
        return true;
    }
};

// The kernel for few rows, for products with one sum or with groups.
template <class OneSum, class Groups>
struct OneSumOrGroups {
    static bool take(const Job& job, const uint8_t* lhs) { return job.grouped() ? Groups::take(job, lhs) : OneSum::take(job, lhs); }
    static bool multiply(const Job& job, const uint8_t* lhs, const Side* sides, int64_t count, BlockScales& scales,
                         BlockScales& folds, int64_t n, float* y) {
        if (job.grouped()) return Groups::multiply(job, lhs, sides, count, scales, folds, n, y);
        return OneSum::multiply(job, lhs, sides, count, scales, folds, n, y);
    }
};
