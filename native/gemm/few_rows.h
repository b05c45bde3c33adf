// Few rows by the 32 columns of a panel: values go from codes to products in registers. The summation order differs
// from that of the engines, so callers must allow it (hop_reorder_few_rows). Included in a namespace (isa.h) of a CPU
// with bfloat16 products, after words_avx512.h and scales.h.

constexpr int kFewRows = 2;

// Scales for sums over blocks of `block` k. The scales of the next `ks` k are contiguous.
struct Factors {
    int64_t block, ks;
    const float* rhs;    // 32 columns per block; nullptr: 1
    const Side* lhs;     // rows; nullptr: 1
    int64_t lhs_stride;  // entries between blocks: 0 or 1
};

// Multiplies N rows of lhs, in tiles of words, by a panel in tiles of codes, into out (N rows x 32). Blocks are
// multiples of 16 k; factors(k) returns the scales from k on.
template <int N, bool Packed, class Numbers, class Find>
inline void few_rows(const Numbers words, const uint8_t* lhs, const uint8_t* rhs, int64_t size, Find factors, float* out) {
    constexpr int kSums = N == 1 ? 2 : 1;  // accumulators per element: two hide the latency of a single row's products
    constexpr int64_t kStep = 16;
    const auto load = [&](int half, int quad) {
        const uint8_t* tile = rhs + half * (Packed ? kTile / 2 : kTile);
        if (!Packed) return load512(tile + quad * 64);
        const __m512i x = load512(tile + quad / 2 * 64);
        return quad % 2 ? _mm512_srli_epi16(x, 4) : x;
    };
    const auto element = [](const uint8_t* at) {
        int32_t pair;
        std::memcpy(&pair, at, 4);
        return (__m512bh)_mm512_set1_epi32(pair);
    };
    __m512 y[N][2] = {};
    for (int64_t k = 0; k < size;) {
        Factors f = factors(k);
        const int64_t end = size - k < f.ks ? size : k + f.ks;
        while (k < end) {
            __m512 c[kSums][2][N][2] = {};
            const int64_t stop = end - k < f.block ? end : k + f.block;
            do {
                HOP_UNROLL
                for (int quad = 0; quad < kStep / 4; ++quad) {
                    __m512i word[2][2];
                    words(load(0, quad), word[0][0], word[0][1]);
                    words(load(1, quad), word[1][0], word[1][1]);
                    HOP_UNROLL
                    for (int row = 0; row < N; ++row) {
                        HOP_UNROLL
                        for (int odd = 0; odd < 2; ++odd) {
                            const __m512bh x = element(lhs + odd * kTile + row * kSlice + quad * 4);
                            HOP_UNROLL
                            for (int half = 0; half < 2; ++half) {
                                __m512& sum = c[quad % kSums][odd][row][half];
                                sum = _mm512_dpbf16_ps(sum, x, (__m512bh)word[half][odd]);
                            }
                        }
                    }
                }
                k += kStep, lhs += kStep, rhs += kStep * kRows / (Packed ? 2 : 1);
                if (k % kSlice == 0) lhs += 2 * kTile - kSlice, rhs += Packed ? kTile / 2 : kTile;  // the next slice
            } while (k < stop);
            HOP_UNROLL
            for (int row = 0; row < N; ++row) {
                HOP_UNROLL
                for (int half = 0; half < 2; ++half) {
                    __m512 sum = _mm512_add_ps(c[0][0][row][half], c[0][1][row][half]);
                    if (kSums == 2) sum = _mm512_add_ps(sum, _mm512_add_ps(c[kSums - 1][0][row][half], c[kSums - 1][1][row][half]));
                    if (f.lhs) sum = _mm512_mul_ps(sum, _mm512_set1_ps(f.lhs->scale[row]));
                    y[row][half] = f.rhs ? _mm512_fmadd_ps(sum, _mm512_loadu_ps(f.rhs + half * kRows), y[row][half]) : sum;
                }
            }
            if (f.rhs) f.rhs += kBlock;
            if (f.lhs) f.lhs += f.lhs_stride;
        }
    }
    for (int row = 0; row < N; ++row)
        for (int half = 0; half < 2; ++half) _mm512_storeu_ps(out + row * kBlock + half * kRows, y[row][half]);
}

template <bool Packed, class Numbers, class Find>
inline void few_rows(int rows, const Numbers& words, const uint8_t* lhs, const uint8_t* rhs, int64_t size, Find factors, float* out) {
    if (rows == 1) few_rows<1, Packed>(words, lhs, rhs, size, factors, out);
    else few_rows<kFewRows, Packed>(words, lhs, rhs, size, factors, out);
}

// Float products with few rows.
struct FewRows {
    // The number of k whose sum is scaled as a unit: a group, or a block of the fold.
    static int64_t block_of(const Job& job) {
        const hop_scale& fold = job.p.rhs.fold;
        if (job.grouped()) return job.group;
        if (fold.format == HOP_NONE) return INT64_MAX;
        return fold.ks < job.p.k ? fold.ks : job.slices * kSlice;
    }

    // Whether this kernel supports the product: packed codes without zero points, with one sum over all k, or one
    // factor per block of rhs from a group or a fold.
    static bool take(const Job& job, const uint8_t* lhs) {
        const hop_operand& o = job.p.rhs;
        const bool folds = o.fold.format != HOP_NONE;
        if (!reorders_few_rows() || job.p.m > kFewRows || o.layout != HOP_TILED || o.format == HOP_UINT8 || has_zero(o)) return false;
        if (job.grouped() && (folds || o.scale.ks != job.group)) return false;
        if (block_of(job) != INT64_MAX && block_of(job) % 16) return false;
        return !folds || are_moderate(lhs, static_cast<int>(job.p.m), job.slices);
    }

    // Whether all nonzero words are between 2^-60 and 2^60: products and their sums, times a scale in that range, stay
    // normal numbers.
    static bool are_moderate(const uint8_t* tiles, int rows, int64_t slices) {
        bool all = true;
        for (int64_t tile = 0; tile < 2 * slices; ++tile, tiles += kTile)
            for (int i = 0; i < rows * kSlice; i += 2) {
                uint16_t word;
                std::memcpy(&word, tiles + i, 2);
                const int magnitude = word & 0x7fff;
                all = all && (magnitude == 0 || (magnitude >= (127 - 60) << 7 && magnitude < (127 + 60) << 7));
            }
        return all;
    }

    // Multiplies `rows` rows of lhs by panel n into y (rows x 32): plain sums, or scaled sums of groups. Returns false
    // if the folds are outside the range of are_moderate, so that words must be multiplied by them first.
    static bool multiply(const Job& job, const uint8_t* lhs, const Side* lhs_sides, int64_t sides, BlockScales& scales,
                               BlockScales& folds, int64_t n, float* y) {
        const hop_operand& o = job.p.rhs;
        const int64_t first = n * kBlock, block = block_of(job);
        bool moderate = true;
        const auto factors = [&](int64_t k) {
            if (block == INT64_MAX) return Factors{block, block, nullptr, nullptr, 0};
            BlockScales& of_rhs = job.grouped() ? scales : folds;
            const int64_t together = BlockScales::kWindow - k / block % BlockScales::kWindow;
            Factors f{block, together * block, of_rhs.at(first, k), nullptr, 0};
            if (!job.grouped()) moderate = moderate && folds.are_moderate();
            else f.lhs = sides > 1 ? lhs_sides + k / block : lhs_sides, f.lhs_stride = sides > 1;
            return f;
        };
        const Decoder& d = *decoder(o.format);
        const uint8_t* codes = tile_in_panel(o, job.rhs.codes, job.p.k, first, 0);
        const int rows = static_cast<int>(job.p.m);
        if (is_narrow(o.format)) few_rows<true>(rows, NarrowWords(d), lhs, codes, job.p.k, factors, y);
        else if (d.codes == 128) few_rows<false>(rows, ByteWords<128>(d), lhs, codes, job.p.k, factors, y);
        else few_rows<false>(rows, ByteWords<256>(d), lhs, codes, job.p.k, factors, y);
        return moderate;
    }
};
