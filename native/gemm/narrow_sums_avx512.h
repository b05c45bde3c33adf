// Few rows of int8 codes times a panel of packed 4-bit codes, with one sum over all k. Codes are read from memory in
// order, and stay in registers. Included in a namespace (isa.h), after few_groups_avx512.h.

template <class Numbers>
struct NarrowSums {
    // Requires known sums of the columns' codes: this kernel does not compute them.
    static bool take(const Job& job, const uint8_t*) {
        const hop_operand& o = job.p.rhs;
        return job.p.m <= kMost && o.layout == HOP_TILED && is_narrow(o.format) && (!lhs_has_zero(job) || knows_sums(job));
    }

    // Computes 32-bit sums (rows x 32).
    static bool multiply(const Job& job, const uint8_t* lhs, const Side*, int64_t, BlockScales&, BlockScales&, int64_t n, float* sums) {
        in_row_blocks<kMost>(static_cast<int>(job.p.m), [&](auto rows, int) { panel<rows.value>(job, lhs, n, sums); });
        return true;
    }

private:
    static constexpr int kMost = 12;                                // maximum rows: 24 accumulator registers
    static constexpr int64_t kStride = Numbers::kLhsBytes * kTile;  // bytes between slices of lhs

    struct Codes {
        __m512i nibble = _mm512_set1_epi8(15), sign;
        explicit Codes(int format) : sign(_mm512_set1_epi8(format == HOP_INT4 ? 8 : 0)) {}
        __m512i operator()(__m512i x) const {
            return _mm512_sub_epi8(_mm512_ternarylogic_epi32(x, nibble, sign, 0x6a), sign);  // ((x & nibble) ^ sign) - sign
        }
    };

    // Few rows use several accumulators per element, because a single one would be limited by latency.
    template <int N>
    static void panel(const Job& job, const uint8_t* a, int64_t n, float* sums) {
        constexpr int S = N == 1 ? 4 : N <= 5 ? 2 : 1;
        const Codes codes(job.p.rhs.format);
        const uint8_t* b = tile_in_panel(job.p.rhs, job.rhs.codes, job.p.k, n * kBlock, 0);
        __m512i c[S][N][2];
        HOP_UNROLL
        for (int s = 0; s < S; ++s) {
            HOP_UNROLL
            for (int row = 0; row < N; ++row) c[s][row][0] = c[s][row][1] = _mm512_setzero_si512();
        }
        for (int64_t slice = 0; slice < job.slices; ++slice, a += kStride, b += kTile)
            for (int quad = 0; quad < kQuads; quad += 4) {
                two_quads<N, S, 0>(codes, a, b, quad, c);
                two_quads<N, S, 2>(codes, a, b, quad + 2, c);
            }
        HOP_UNROLL
        for (int row = 0; row < N; ++row) {
            HOP_UNROLL
            for (int half = 0; half < 2; ++half) {
                __m512i sum = c[0][row][half];
                HOP_UNROLL
                for (int s = 1; s < S; ++s) sum = _mm512_add_epi32(sum, c[s][row][half]);
                store512(sums + row * kBlock + half * kRows, sum);
            }
        }
    }

    // Adds the products of two quads to accumulators `First` and `First` + 1, modulo S.
    template <int N, int S, int First>
    static HOP_INLINED void two_quads(const Codes& codes, const uint8_t* a, const uint8_t* b, int quad, __m512i (&c)[S][N][2]) {
        constexpr int first = First % S, second = (First + 1) % S;
        __m512i even[2], odd[2];
        HOP_UNROLL
        for (int half = 0; half < 2; ++half) {
            fetch_in_order(b + quad * 64 + half * 64);
            const __m512i x = load512(b + half * (kTile / 2) + quad * 32);
            even[half] = codes(x), odd[half] = codes(_mm512_srli_epi16(x, 4));
        }
        HOP_UNROLL
        for (int row = 0; row < N; ++row) {
            const __m512i x = four_codes(a + row * kSlice + quad * 4), y = four_codes(a + row * kSlice + quad * 4 + 4);
            HOP_UNROLL
            for (int half = 0; half < 2; ++half) {
                c[first][row][half] = _mm512_dpbusd_epi32(c[first][row][half], x, even[half]);
                c[second][row][half] = _mm512_dpbusd_epi32(c[second][row][half], y, odd[half]);
            }
        }
    }
};
