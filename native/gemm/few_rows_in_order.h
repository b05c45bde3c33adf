// Few rows of floats by a panel, bit for bit with the sums of the many-row engine: words go from codes to products in
// registers. Included in a namespace (isa.h), after floats_avx512.h.

template <class Products>
class FewRows {
public:
    // Whether this kernel supports the product: packed codes without zero points, with one sum over all k.
    static bool take(const Job& job, const uint8_t*) {
        const hop_operand& o = job.p.rhs;
        const int most = o.fold.format == HOP_NONE ? 2 * kTogether : kTogether;  // fold scales in once only
        return job.p.m <= most && o.layout == HOP_TILED && !job.grouped() && !(o.format == HOP_UINT4 && has_zero(o));
    }

    // Multiplies the rows of lhs by panel n into sums (rows x 32).
    static bool multiply(const Job& job, const uint8_t* lhs, const Side*, int64_t, BlockScales&, BlockScales& folds, int64_t n, float* sums) {
        const Decoder& d = *decoder(job.p.rhs.format);
        if (is_narrow(job.p.rhs.format)) by_rows<true>(job, NarrowWords(d), lhs, folds, n, sums);
        else if (d.codes == 128) by_rows<false>(job, ByteWords<128>(d), lhs, folds, n, sums);
        else by_rows<false>(job, ByteWords<256>(d), lhs, folds, n, sums);
        return true;
    }

private:
    static constexpr int kTogether = 6;  // rows whose sums fit in registers together with the tables

    template <bool Packed, class Numbers>
    static void by_rows(const Job& job, const Numbers words, const uint8_t* lhs, BlockScales& folds, int64_t n, float* sums) {
        in_row_blocks<kTogether>(static_cast<int>(job.p.m), [&](auto rows, int first) {
            panel<rows.value, Packed>(job, words, lhs + first * Products::kLhsBytes * kSlice, folds, n, sums + first * kBlock);
        });
    }

    template <int N, bool Packed, class Numbers>
    static void panel(const Job& job, const Numbers words, const uint8_t* lhs, BlockScales& folds, int64_t n, float* sums) {
        const int64_t ks = job.p.rhs.fold.ks, bytes = Packed ? kTile : 2 * kTile;
        const bool has_fold = job.p.rhs.fold.format != HOP_NONE, as_they_lie = ks % kSlice == 0 || kSlice % ks == 0;
        const int vectors = ks < kSlice ? static_cast<int>(ks / 4) : kQuads;
        const uint8_t* rhs = tile_in_panel(job.p.rhs, job.rhs.codes, job.p.k, n * kBlock, 0);
        __m512 c[N][2] = {};
        for (int64_t s = 0; s < job.slices; ++s, lhs += Products::kLhsBytes * kTile, rhs += bytes) {
            if (!has_fold) {
                slice<N, Packed, false>(words, lhs, rhs, nullptr, kQuads, 0, c);
                continue;
            }
            if (as_they_lie && (s + 1) * kSlice <= job.p.k) {
                __m512 before[N][2];
                std::memcpy(before, c, sizeof(c));
                if (slice<N, Packed, true>(words, lhs, rhs, folds.at(n * kBlock, s * kSlice), vectors, special_of(job), c)) continue;
                std::memcpy(c, before, sizeof(c));
            }
            by_tiles<N>(job, lhs, folds, n, s, c);
        }
        for (int i = 0; i < N; ++i)
            for (int half = 0; half < 2; ++half) _mm512_storeu_ps(sums + i * kBlock + half * kRows, c[i][half]);
    }

    static int special_of(const Job& job) { return decoder(job.p.rhs.format)->special; }

    // Multiplies a slice with scales or values that `slice` does not support.
    template <int N>
    static __attribute__((noinline)) void by_tiles(const Job& job, const uint8_t* lhs, BlockScales& folds, int64_t n, int64_t slice, __m512 (&c)[N][2]) {
        const Words words(job.p.rhs.format);
        alignas(64) uint8_t tiles[4 * kTile];
        for (int half = 0; half < 2; ++half)
            tile_of_words(job, words, folds, n * kBlock + half * kRows, slice, tiles + half * 2 * kTile);
        for (int quad = 0; quad < kQuads; ++quad)
            for (int e = 0; e < 2; ++e) add_quad<Products>(lhs, tiles, quad, e, c);
    }

    // Multiplies a slice; `vectors` quads share a fold for each column. Returns false if a folded word would be wrong:
    // infinities, NaN, and results that are not normal numbers.
    template <int N, bool Packed, bool Folded, class Numbers>
    static HOP_IN_REGISTERS bool slice(const Numbers& words, const uint8_t* lhs, const uint8_t* rhs, const float* fold, int vectors, int special, __m512 (&c)[N][2]) {
        constexpr bool halves = Numbers::kHalves;
        const __m512i magnitude = _mm512_set1_epi8(halves ? 7 : 127);
        __m512i most = _mm512_setzero_si512();
        __mmask16 unsafe = 0;
        for (int first = 0; first < kQuads; first += vectors) {
            Fold f[2];
            if (Folded) f[0] = fold_of<halves>(fold), f[1] = fold_of<halves>(fold + kRows), fold += kBlock;
            for (int quad = first; quad < first + vectors; ++quad) {
                __m512i word[2][2];
                HOP_UNROLL
                for (int half = 0; half < 2; ++half) {
                    const uint8_t* tile = rhs + half * (Packed ? kTile / 2 : kTile);
                    if (!Packed || half == 0) fetch_in_order(rhs + (Packed ? quad : 2 * quad + half) * 64);
                    __m512i code;
                    if (Packed) code = _mm512_srl_epi16(load512(tile + quad / 2 * 64), _mm_cvtsi32_si128(quad % 2 * 4));
                    else code = load512(tile + quad * 64);
                    words(code, word[half][0], word[half][1]);
                    if (!Folded) continue;
                    if (f[half].unsafe) unsafe |= f[half].special | _mm512_mask_test_epi32_mask(f[half].unsafe, code, magnitude);
                    if (!halves) most = _mm512_max_epu8(most, _mm512_and_si512(code, magnitude));
                    word[half][0] = folded<halves>(word[half][0], f[half]);
                    word[half][1] = folded<halves>(word[half][1], f[half]);
                }
                Products::template add<N>(lhs, word[0][0], word[1][0], quad, 0, c);
                Products::template add<N>(lhs, word[0][1], word[1][1], quad, 1, c);
            }
        }
        if (!Folded) return true;
        if (!halves && special < 256 && _mm512_cmpge_epu8_mask(most, _mm512_set1_epi8(static_cast<char>(special)))) return false;
        return !unsafe;
    }
};
