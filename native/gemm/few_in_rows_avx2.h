// Few rows of int8 or uint8 times codes in rows, with AVX2. Included in a namespace (isa.h), after engine_avx2.h.

// Reads the rows of rhs in place: tiles of them would be used once.
class FewInRows {
public:
    static constexpr bool kSumsColumns = true;

    static bool take(const Job& job, const uint8_t*) {
        return job.p.m <= kMost && job.p.rhs.layout == HOP_STRIDED && job.p.rhs.k_stride == 1 && !job.grouped();
    }

    // Computes y (rows x 32), int32 sums; its last row becomes the sums of the columns' codes if they are needed.
    static bool multiply(const Job& job, const uint8_t* lhs, const Side*, int64_t, BlockScales&, BlockScales&, int64_t n, float* y) {
        const bool summed = lhs_has_zero(job) && !knows_sums(job);
        std::memset(y, 0, sizeof(float) * kBlock * kBlock);  // missing columns have no sums
        in_row_blocks<kMost>(static_cast<int>(job.p.m), [&](auto rows, int) {
            if (summed) columns<rows.value, true>(job, lhs, n * kBlock, reinterpret_cast<int32_t*>(y));
            else columns<rows.value, false>(job, lhs, n * kBlock, reinterpret_cast<int32_t*>(y));
        });
        return true;
    }

private:
    static constexpr int kMost = 4;  // more rows are faster with tiles

    template <int N, bool Summed>
    static void columns(const Job& job, const uint8_t* lhs, int64_t first, int32_t* y) {
        constexpr int C = N <= 2 ? 4 : 2, S = N + Summed;  // columns at a time; sums of a column
        const hop_operand& o = job.p.rhs;
        const int64_t rest = job.p.n - first, count = rest < kBlock ? rest : kBlock;
        const uint8_t turned = o.format == HOP_UINT8 ? 0x80 : 0;  // uint8 becomes int8
        const __m256i turn = _mm256_set1_epi8(static_cast<char>(turned)), ones = _mm256_set1_epi16(1);
        for (int64_t j = 0; j < count; j += C) {
            __m256i sums[C][S];
            const uint8_t* b[C];
            each_pair<C, S>([&](auto c, auto i) HOP_INLINED { sums[c][i] = _mm256_setzero_si256(); });
            each<C>([&](auto c) HOP_INLINED {  // the last column again for those that are missing
                const int64_t column = first + (j + c < count ? j + c : count - 1);
                b[c] = static_cast<const uint8_t*>(job.rhs.codes) + column * o.row_stride;
            });
            const uint8_t* a = lhs;
            for (int64_t left = job.p.k; left > 0; left -= kSlice, a += Int8::kLhsBytes * kTile) {
                uint8_t end[C][kSlice];
                if (left < kSlice)
                    for (int c = 0; c < C; ++c) {
                        std::memset(end[c], turned, kSlice);
                        std::memcpy(end[c], b[c], static_cast<size_t>(left));
                        b[c] = end[c];
                    }
                each<2>([&](auto half) HOP_INLINED {
                    each<C>([&](auto c) HOP_INLINED {
                        const __m256i codes = _mm256_xor_si256(load256(b[c] + half * 32), turn);
                        const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 8), odd = _mm256_srai_epi16(codes, 8);
                        each<N>([&](auto i) HOP_INLINED {
                            const uint8_t* x = a + i * Int8::kLhsBytes * kSlice + half * 32;
                            const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(even, load256(x)), _mm256_madd_epi16(odd, load256(x + kSlice)));
                            sums[c][i] = _mm256_add_epi32(sums[c][i], sum);
                        });
                        if (Summed) sums[c][S - 1] = _mm256_add_epi32(sums[c][S - 1], _mm256_madd_epi16(_mm256_add_epi16(even, odd), ones));
                    });
                });
                each<C>([&](auto c) HOP_INLINED { b[c] += kSlice; });
            }
            each_pair<C, S>([&](auto c, auto i) HOP_INLINED {
                if (j + c < count) y[(Summed && i == N ? kBlock - 1 : int64_t(i)) * kBlock + j + c] = sum_of(sums[c][i]);
            });
        }
    }

    static int32_t sum_of(__m256i x) {
        __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
        return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
    }
};

class WordsOrFew : public Avx2<Int8> {
public:
    using Avx2<Int8>::Avx2;
    using Few = FewInRows;
    static constexpr bool kFewRows = true;
};
