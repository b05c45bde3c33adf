// Few rows by a panel of packed codes of 4 bits in groups: codes go from memory to products in registers. Included in a
// namespace (isa.h), after gemm.h.

// The zero points of 32 rows, group after group along k, those of many groups found at once, a byte each.
class GroupZeros {
public:
    GroupZeros(const hop_operand& o, const void* data, int64_t rows, int64_t groups)
        : o_(o), data_(static_cast<const uint8_t*>(data)), rows_(rows), groups_(groups) {}

    // Of rows first..first + 31 in groups begin..begin + kWindow - 1, 32 bytes each.
    const uint8_t* at(int64_t first, int64_t begin) {
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

    // Whether those that were found last are all below 16.
    bool are_small() const {
        __m512i any = load512(window_);
        for (int i = 64; i < kWindow * kBlock; i += 64) any = _mm512_or_si512(any, load512(window_ + i));
        return _mm512_test_epi8_mask(any, _mm512_set1_epi8(static_cast<char>(0xf0))) == 0;
    }

    static constexpr int64_t kWindow = BlockScales::kWindow;

private:
    void part(int64_t first, int64_t rows, int64_t begin, int64_t count, int half) {
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

// What a group's sums are made from: quads `quad` to `end` of each of so many slices, and its zero points and terms.
struct NarrowGroup {
    const uint8_t *a, *b;
    int64_t stride, slices;  // of `a`: bytes from slice to slice
    int quad, end;
    const uint8_t* zero;  // of 32 columns
    const Side* lhs;
    int32_t terms;
};

template <class Numbers>
struct NarrowGroups {
    static constexpr int kMost = 6;  // rows

    static bool take(const Job& job, const uint8_t*) {
        const hop_operand& o = job.p.rhs;
        if (has_zero(o) && (o.format != HOP_UINT4 || o.zero_format == HOP_INT8 || o.zero < 0 || o.zero > 15)) return false;
        return job.p.m <= kMost && o.layout == HOP_TILED && is_narrow(o.format) && o.fold.format == HOP_NONE &&
               keeps_groups(job) && o.scale.ks == job.group;
    }

    // To y (rows x 32), as kept_groups, bit for bit. False if a zero point needs another way.
    static bool multiply(const Job& job, const uint8_t* lhs, const Side* lhs_sides, int64_t sides, BlockScales& scales,
                         BlockScales&, int64_t n, float* y) {
        bool done = false;
        in_row_blocks<kMost>(static_cast<int>(job.p.m), [&](auto rows, int) {
            const bool zeros = has_zero(job.p.rhs), scaled = Numbers::kBytes == 1 || job.p.lhs.scale.format != HOP_NONE;
            const auto run = [&](auto zero, auto scale) {
                done = panel<rows.value, zero.value, scale.value>(job, lhs, lhs_sides, sides, scales, n, y);
            };
            constexpr std::true_type yes;
            constexpr std::false_type no;
            if constexpr (Numbers::kBytes == 1) return zeros ? run(yes, yes) : run(no, yes);
            else if (scaled) zeros ? run(yes, yes) : run(no, yes);
            else zeros ? run(yes, no) : run(no, no);
        });
        return done;
    }

private:
    static constexpr int64_t kAhead = 8 << 10;  // bytes of codes that are on their way

    // What the next panel's rows have of scales or zero points, if they lie side by side.
    static Ahead rows_ahead(const Job& job, const hop_scale& s, const void* data, int64_t first, int64_t bytes) {
        if (!data || s.rows != 1 || s.k_stride != 1 || first + 2 * kBlock > job.p.n) return Ahead(nullptr, 0, 1);
        const int64_t size = kBlock * s.row_stride * bytes;
        return Ahead(static_cast<const char*>(data) + first / kBlock * size + size, size, job.groups);
    }

    template <int N, bool Zero, bool Scaled>
    static bool panel(const Job& job, const uint8_t* lhs, const Side* lhs_sides, int64_t sides, BlockScales& scales, int64_t n,
                      float* out) {
        constexpr int64_t stride = Numbers::kLhsBytes * kTile;
        const typename Numbers::template Narrow<N, Zero> narrow(job.p.rhs.format);
        const int64_t first = n * kBlock, span = ceil_div(job.group, kSlice);
        const int quads = job.group < kSlice ? static_cast<int>(job.group / 4) : kQuads;
        GroupZeros zeros(job.p.rhs, job.rhs.zero, job.p.n, job.groups);
        NarrowGroup g{lhs, tile_in_panel(job.p.rhs, job.rhs.codes, job.p.k, first, 0), stride, span, 0, quads, nullptr, nullptr, 0};
        int64_t slices = job.slices;
        Ahead codes(g.b + kAhead, job.slices * kTile, job.groups), next_scales = rows_ahead(job, job.p.rhs.scale, job.rhs.scale, first, 4);
        Ahead next_zeros = rows_ahead(job, job.p.rhs.scale, Zero ? job.rhs.zero : nullptr, first, 1);
        __m512 y[N][2];
        HOP_UNROLL
        for (int i = 0; i < N; ++i) y[i][0] = y[i][1] = _mm512_set1_ps(-0.f);  // -0 + x is x, for each x
        for (int64_t begin = 0; begin < job.groups; begin += GroupZeros::kWindow) {
            const int64_t count = job.groups - begin < GroupZeros::kWindow ? job.groups - begin : GroupZeros::kWindow;
            const float* scale = scales.at(first, begin * job.group);
            if (Zero) {
                g.zero = zeros.at(first, begin);
                if (Numbers::kBytes != 1 && !zeros.are_small()) return false;
            }
            for (int64_t i = begin; i < begin + count; ++i, scale += kBlock, g.zero += Zero ? kBlock : 0) {
                g.lhs = lhs_sides + (sides > 1 ? i : 0);
                g.terms = static_cast<int32_t>(job.terms(i));
                if (g.slices > slices) g.slices = slices;
                codes(), next_scales(), next_zeros();
                typename Numbers::Vector c[N][2];
                narrow.sums(g, c);
                HOP_UNROLL
                for (int row = 0; row < N; ++row) {
                    HOP_UNROLL
                    for (int half = 0; half < 2; ++half) {
                        __m512 x = Numbers::number(c[row][half]);
                        if (Scaled) x = _mm512_mul_ps(x, _mm512_set1_ps(g.lhs->scale[row]));
                        y[row][half] = _mm512_add_ps(y[row][half], _mm512_mul_ps(x, _mm512_load_ps(scale + half * kRows)));
                    }
                }
                if (g.end < kQuads) {
                    g.quad = g.end, g.end += quads;
                } else {
                    g.quad = 0, g.end = quads, slices -= g.slices;
                    g.a += g.slices * stride, g.b += g.slices * kTile;
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

// Sums of int8 codes, less 128, by those of 4 bits: vpdpbusd. What zero points add is that of pair_row and pair_column,
// of sums of columns that are found here.
template <int N, bool Zero>
struct NarrowInt8 {
    __m512i sign;  // what makes unsigned codes of signed ones, and is then taken from them

    explicit NarrowInt8(int format) : sign(_mm512_set1_epi8(format == HOP_INT4 ? 8 : 0)) {}

    void sums(const NarrowGroup& g, __m512i (&c)[N][2]) const {
        const __m512i nibble = _mm512_set1_epi8(15), minus = _mm512_set1_epi8(-1);
        __m512i pair[2], zero[2];
        HOP_UNROLL
        for (int half = 0; half < 2; ++half) {
            HOP_UNROLL
            for (int i = 0; i < N; ++i) c[i][half] = _mm512_setzero_si512();
            pair[half] = zero[half] = _mm512_setzero_si512();
            if (Zero) {
                zero[half] = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(g.zero + half * kRows)));
                pair[half] = _mm512_mullo_epi32(zero[half], _mm512_set1_epi32(g.terms));
            }
        }
        const uint8_t *a = g.a, *b = g.b;
        for (int64_t slice = 0; slice < g.slices; ++slice, a += g.stride, b += kTile) {
            __m512i bytes[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};  // of 16 quads, 15 each at most
            HOP_UNROLL_BY_TWO
            for (int quad = g.quad; quad < g.end; quad += 2) {
                HOP_UNROLL
                for (int half = 0; half < 2; ++half) {
                    const __m512i x = load512(b + half * (kTile / 2) + quad * 32);
                    const __m512i low = _mm512_ternarylogic_epi32(x, nibble, sign, 0x6a);  // (x & nibble) ^ sign
                    const __m512i high = _mm512_ternarylogic_epi32(_mm512_srli_epi16(x, 4), nibble, sign, 0x6a);
                    bytes[half] = _mm512_add_epi8(bytes[half], _mm512_add_epi8(low, high));
                    const __m512i even = _mm512_sub_epi8(low, sign), odd = _mm512_sub_epi8(high, sign);
                    HOP_UNROLL
                    for (int i = 0; i < N; ++i) {
                        c[i][half] = _mm512_dpbusd_epi32(c[i][half], element(a + i * kSlice + quad * 4), even);
                        c[i][half] = _mm512_dpbusd_epi32(c[i][half], element(a + i * kSlice + quad * 4 + 4), odd);
                    }
                }
            }
            // terms · zero - Σ of the codes, as they were with `sign` added
            const __m512i added = _mm512_dpbusd_epi32(_mm512_setzero_si512(), sign, _mm512_set1_epi8(static_cast<char>(g.end - g.quad)));
            HOP_UNROLL
            for (int half = 0; half < 2; ++half)
                pair[half] = _mm512_dpbusd_epi32(_mm512_add_epi32(pair[half], added), bytes[half], minus);
        }
        HOP_UNROLL
        for (int half = 0; half < 2; ++half) {
            const __m512i upper = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_setzero_si512(), zero[half]), 16);
            pair[half] = _mm512_ternarylogic_epi32(pair[half], _mm512_set1_epi32(0xffff), upper, 0xea);  // (pair & 0xffff) | upper
            HOP_UNROLL
            for (int i = 0; i < N; ++i)
                c[i][half] = _mm512_add_epi32(c[i][half], _mm512_madd_epi16(_mm512_set1_epi32(g.lhs->pair[i]), pair[half]));
        }
    }

private:
    static __m512i element(const uint8_t* at) {
        int32_t four;
        std::memcpy(&four, at, 4);
        return _mm512_set1_epi32(four);
    }
};

// Sums of words by those of codes of 4 bits: the numbers come from a table of words, as Words finds them.
template <int N, bool Zero, class Products>
struct NarrowWordsOfGroups {
    __m512i table;

    explicit NarrowWordsOfGroups(int format) {
        const Decoder& d = Zero ? *shifted_decoder() : *decoder(format);
        uint16_t words[32];
        for (int i = 0; i < 32; ++i) {
            const int code = Zero ? i : i % 16;
            words[i] = static_cast<uint16_t>(d.high[code] << 8 | d.low[code]);
        }
        table = load512(words);
    }

    void sums(const NarrowGroup& g, __m512 (&c)[N][2]) const {
        __m512i up[2] = {};
        HOP_UNROLL
        for (int half = 0; half < 2; ++half) {
            HOP_UNROLL
            for (int i = 0; i < N; ++i) c[i][half] = _mm512_setzero_ps();
            if (!Zero) continue;
            const __m512i z = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(g.zero + half * kRows)));
            up[half] = _mm512_sub_epi16(_mm512_set1_epi16(16), _mm512_or_si512(z, _mm512_slli_epi32(z, 16)));
        }
        const auto words = [&](__m512i code, int half, bool clean) {
            if (Zero) code = _mm512_add_epi16(clean ? code : _mm512_and_si512(code, _mm512_set1_epi16(15)), up[half]);
            return _mm512_permutexvar_epi16(code, table);
        };
        const uint8_t *a = g.a, *b = g.b;
        for (int64_t slice = 0; slice < g.slices; ++slice, a += g.stride, b += kTile) {
            HOP_UNROLL_BY_TWO
            for (int quad = g.quad; quad < g.end; quad += 2) {
                __m512i found[2][4];
                HOP_UNROLL
                for (int half = 0; half < 2; ++half) {
                    const __m512i x = load512(b + half * (kTile / 2) + quad * 32);
                    found[half][0] = words(x, half, false);
                    found[half][1] = words(_mm512_srli_epi16(x, 8), half, false);
                    found[half][2] = words(_mm512_srli_epi16(x, 4), half, false);
                    found[half][3] = words(_mm512_srli_epi16(x, 12), half, true);
                }
                HOP_UNROLL
                for (int at = 0; at < 4; ++at) Products::template add<N>(a, found[0][at], found[1][at], quad + at / 2, at % 2, c);
            }
        }
    }
};

// Few rows of a product: of one sum, or of groups.
template <class OneSum, class Groups>
struct OneSumOrGroups {
    static bool take(const Job& job, const uint8_t* lhs) { return job.grouped() ? Groups::take(job, lhs) : OneSum::take(job, lhs); }
    static bool multiply(const Job& job, const uint8_t* lhs, const Side* sides, int64_t count, BlockScales& scales,
                         BlockScales& folds, int64_t n, float* y) {
        if (job.grouped()) return Groups::multiply(job, lhs, sides, count, scales, folds, n, y);
        return OneSum::multiply(job, lhs, sides, count, scales, folds, n, y);
    }
};
