// Integer products with 4-bit codes, with AVX2 and AVX-VNNI. Included in a namespace (isa.h), after gemm.h.
//
// vpmaddubsw multiplies the codes, converted to unsigned (Job::rhs_shift), by int8. Eight of its results, at most 2 ·
// 15 · 128 each, are added in 16 bits. vpdpbusd (HOP_IN_AVX_VNNI) adds them in 32 bits. The conversion to unsigned is
// handled as a zero point.

constexpr int kWidened = 8;  // quads whose sums fit in 16 bits

inline __m256i four_codes(const uint8_t* at) {
    int32_t four;
    std::memcpy(&four, at, 4);
    return _mm256_set1_epi32(four);
}

#if defined(HOP_IN_AVX_VNNI)
// Products of unsigned codes and int8, and sum += products.
inline HOP_INLINED __m256i products_of(__m256i codes, __m256i x) { return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), codes, x); }
inline HOP_INLINED void add_products(__m256i& sum, __m256i codes, __m256i x) { sum = _mm256_dpbusd_avx_epi32(sum, codes, x); }
inline HOP_INLINED __m256i in_int32(__m256i sum, __m256i) { return sum; }
#else
// Products of unsigned codes and int8 in 16 bits, and sum += products, in the register of the sum: otherwise GCC splits
// sums and moves them to memory.
inline HOP_INLINED __m256i products_of(__m256i codes, __m256i x) { return _mm256_maddubs_epi16(codes, x); }
inline HOP_INLINED void add_products(__m256i& sum, __m256i codes, __m256i x) {
    __asm__("vpaddw %1, %0, %0" : "+x"(sum) : "x"(products_of(codes, x)));
}
inline HOP_INLINED __m256i in_int32(__m256i sum, __m256i ones) { return _mm256_madd_epi16(sum, ones); }
#endif

// 16-bit ones that the compiler keeps in a register instead of recreating them at each use.
inline HOP_INLINED __m256i kept_ones() {
    __m256i ones = _mm256_set1_epi16(1);
    __asm__("" : "+x"(ones));
    return ones;
}

// y + (float(c) · s_lhs) · s_rhs, each operation rounded.
inline HOP_INLINED void add_scaled(__m256i c, float lhs, __m256 rhs, float* y) {
    const __m256 x = _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(c), _mm256_set1_ps(lhs)), rhs);
    _mm256_storeu_ps(y, _mm256_add_ps(_mm256_loadu_ps(y), x));
}

// Many rows, with tiles of bytes: lhs as [16 rows][64] int8, rhs as [16 quads][16 columns][4] unsigned.
class Narrow {
public:
    using Sum = int32_t;
    static constexpr int kBytes = 1, kLhsBytes = 1;
    static constexpr bool kFewRows = false, kKept = true;
    static constexpr int64_t kGroup = 256 << 10;

    Narrow(int, int quads) : quads_(quads) {}

    static void lhs_slice(const Job& job, int64_t first, int rows, int64_t slice, uint8_t* out) { pack_int8(job, first, rows, slice, out); }
    static void rhs_tile(const Job& job, BlockScales&, int64_t first, int64_t slice, uint8_t* out) {
        const hop_operand& o = job.p.rhs;
        const __m256i nibble = _mm256_set1_epi8(15), turned = _mm256_set1_epi8(static_cast<char>(job.rhs_shift));
        const auto store = [&](uint8_t* to, __m256i x) {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_xor_si256(_mm256_and_si256(x, nibble), turned));
        };
        if (o.layout == HOP_TILED) {
            const uint8_t* codes = tile_in_panel(o, job.rhs.codes, job.p.k, first, slice);
            for (int i = 0; i < kTile / 2; i += 64)
                for (int half = 0; half < 64; half += 32) {
                    const __m256i x = load256(codes + i + half);
                    store(out + i * 2 + half, x), store(out + i * 2 + 64 + half, _mm256_srli_epi16(x, 4));
                }
        } else {
            const uint8_t* codes = tile_of_codes(o, job.rhs.codes, job.p.n, job.p.k, first, slice, out);
            for (int i = 0; i < kTile; i += 32) store(out + i, load256(codes + i));
        }
        for (int64_t k = job.p.k - slice * kSlice; job.rhs_shift && k < kSlice; ++k)  // code 0 does not represent 0 here
            for (int row = 0; row < kRows; ++row) out[(k / 4 * kRows + row) * 4 + k % 4] = 0;
    }

    template <int R, class Between>
    void multiply(const uint8_t* a, const uint8_t* b, int rows, int64_t slices, Sum* sums, bool add, Between& between) {
        blocks(rows, [&](auto n, int first, int tile) {
            const Once<Between> once{between, first == 0 && tile == 0};
            const uint8_t *left = a + first * kSlice, *right = b + tile * kTile;
            Sum* own = sums + first * kBlock + tile * kRows;
            for (int64_t s = 0; s < slices; ++s, left += R * kTile, right += 2 * kTile) {
                add_sums<n.value>(left, right, 0, kQuads, add || s > 0, own);
                once();
            }
        });
    }

    template <int R, class Between>
    void step(const uint8_t* a, const uint8_t* b, int rows, int quad, Sum* sums, Between&) {
        blocks(rows, [&](auto n, int first, int tile) {
            add_sums<n.value>(a + first * kSlice, b + tile * kTile, quad, quads_, false, sums + first * kBlock + tile * kRows);
        });
    }

    static bool keeps(const Job& job) { return job.grouped() && are_paired(job); }

    // Like add_group of groups_plain.h, bit for bit.
    template <class Between>
    void groups(const Job&, const KeptGroups& g, int rows, Between& between) {
        blocks(rows, [&](auto n, int first, int tile) {
            constexpr int N = n.value;
            const Once<Between> once{between, first == 0 && tile == 0};
            const uint8_t *left = g.a + first * kSlice, *right = g.b + tile * kTile;
            float* const y = g.y + first * kBlock + tile * kRows;
            const __m256i ones = kept_ones();
            int64_t slices = g.slices;
            int quad = 0;
            if (g.first) clear_rows(y, N, 1);
            for (int64_t group = 0; group < g.groups; ++group) {
                const Side& of_rows = g.lhs[group * g.lhs_step];
                const int32_t *row_pair = of_rows.pair + first, *pair = g.rhs[group].pair + tile * kRows;
                const float *row_scale = of_rows.scale + first, *scale = g.rhs[group].scale + tile * kRows;
                const auto finish = [&](auto i, auto j, __m256i c) HOP_INLINED {
                    c = _mm256_add_epi32(c, _mm256_madd_epi16(_mm256_set1_epi32(row_pair[i]), load256(pair + j * 8)));
                    add_scaled(c, row_scale[i], _mm256_load_ps(scale + j * 8), y + i * kBlock + j * 8);
                };
                if (g.quads <= kWidened) {
                    __m256i part[N][2];
                    if (g.quads == kWidened) products<N, kWidened>(left, right, quad, part);
                    else products<N, 4>(left, right, quad, part);
                    each_pair<N, 2>([&](auto i, auto j) HOP_INLINED { finish(i, j, in_int32(part[i][j], ones)); });
                    quad += g.quads;
                    if (quad == kQuads) quad = 0, --slices, left += g.stride, right += 2 * kTile;
                } else {
                    alignas(32) Sum sums[N * kBlock];
                    bool add = false;
                    for (int64_t of_group = slices < g.span ? slices : g.span; of_group > 0; --of_group, add = true) {
                        add_sums<N>(left, right, 0, kQuads, add, sums);
                        --slices, left += g.stride, right += 2 * kTile;
                    }
                    each_pair<N, 2>([&](auto i, auto j) HOP_INLINED { finish(i, j, load256(sums + i * kBlock + j * 8)); });
                }
                once();
            }
        });
    }

private:
    static constexpr int kMost = 6;  // rows at a time: 12 accumulator registers

    template <class Body>
    static void blocks(int rows, Body body) {
        for (int tile = 0; tile < 2; ++tile) in_row_blocks<kMost>(rows, [&](auto n, int first) { body(n, first, tile); });
    }

    // Adds products of `quads` quads of a slice to sums in memory.
    template <int N>
    static void add_sums(const uint8_t* a, const uint8_t* b, int quad, int quads, bool add, Sum* sums) {
        for (const int end = quad + quads; quad < end; quad += kWidened, add = true) {
            __m256i part[N][2];
            if (quads < kWidened) products<N, 4>(a, b, quad, part);
            else products<N, kWidened>(a, b, quad, part);
            each_pair<N, 2>([&](auto i, auto j) HOP_INLINED {
                Sum* own = sums + i * kBlock + j * 8;
                __m256i x = in_int32(part[i][j], _mm256_set1_epi16(1));
                if (add) x = _mm256_add_epi32(x, load256(own));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(own), x);
            });
        }
    }

    // Sums of Q quads, to be converted with in_int32.
    template <int N, int Q>
    HOP_INLINED static inline void products(const uint8_t* a, const uint8_t* b, int quad, __m256i (&part)[N][2]) {
        a += quad * 4, b += quad * 64;
        const __m256i left = load256(b), right = load256(b + 32);
        each<N>([&](auto i) HOP_INLINED {
            const __m256i x = four_codes(a + i * kSlice);
            part[i][0] = products_of(left, x), part[i][1] = products_of(right, x);
        });
        HOP_UNROLL
        for (int q = 1; q < Q; ++q) {
            const __m256i first = load256(b + q * 64), second = load256(b + q * 64 + 32);
            each<N>([&](auto i) HOP_INLINED {
                const __m256i x = four_codes(a + i * kSlice + q * 4);
                add_products(part[i][0], first, x), add_products(part[i][1], second, x);
            });
        }
    }

    int quads_;
};
