// Integer products with AVX2: int8 as int16. Included by each file that uses this engine, in the namespace of its
// instructions; engine_avx_vnni.h adds dot products of four bytes.
#include "common/rounding.h"
#include "gemm/decode_plainly.h"
#include "gemm/columns_avx2.h"
#include "gemm/tiles_plain.h"
#include "gemm/words_avx2.h"
#include "gemm/scales.h"
#include "gemm/pack_lhs.h"
#include "gemm/pack_rhs.h"
#include "gemm/epilogue.h"
#include "gemm/groups_plain.h"
#include "gemm/finish_plain.h"
#include "gemm/requantize.h"
#include "gemm/gemm.h"
#include "gemm/row_blocks.h"
#include "gemm/loads_avx2.h"

struct Int32Sums {
    using Sum = int32_t;
    using Vector = __m256i;
    static Vector zero() { return _mm256_setzero_si256(); }
    static Vector load(const Sum* p) { return load256(p); }
    static void store(Sum* p, Vector x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
};

// Operands as int16, in pairs of k 0 and 2, and of k 1 and 3.
struct Int8 : Int32Sums {
    static constexpr int kBytes = 1, kLhsBytes = 2, kMost = 4;
    static constexpr bool kWidens = true;  // whether `quad` widens codes, which is done once for many rows
    static void store256(uint8_t* p, Vector x) { _mm256_store_si256(reinterpret_cast<__m256i*>(p), x); }

    static void lhs_tile(const uint8_t* tile, uint8_t* out) {
        int16_t words[kSlice];
        for (int row = 0; row < kRows; ++row, tile += kSlice, out += sizeof(words)) {
            for (int i = 0; i < 2 * kQuads; ++i) {
                words[i] = static_cast<int8_t>(tile[2 * i]);
                words[2 * kQuads + i] = static_cast<int8_t>(tile[2 * i + 1]);
            }
            std::memcpy(out, words, sizeof(words));
        }
    }

    // The codes of a tile as int16: for each quad even and odd k of its first eight columns, then of the others.
    static void widen(const uint8_t* codes, uint8_t* words) {
        for (int i = 0; i < 2 * kQuads; ++i, codes += 32, words += 64) {
            const __m256i x = load256(codes);
            store256(words, _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
            store256(words + 32, _mm256_srai_epi16(x, 8));
        }
    }

    // Adds the products of a quad of N rows and 16 columns, given even and odd k of each half of the columns.
    template <int N>
    HOP_INLINED static void add_products(const uint8_t* a, int at, const __m256i (&even)[2], const __m256i (&odd)[2],
                                         Vector (&sums)[N][2]) {
        HOP_UNROLL
        for (int i = 0; i < N; ++i) {
            int32_t pairs[2];
            std::memcpy(&pairs[0], a + i * kLhsBytes * kSlice + at * 4, 4);
            std::memcpy(&pairs[1], a + i * kLhsBytes * kSlice + kSlice + at * 4, 4);
            const __m256i x = _mm256_set1_epi32(pairs[0]), y = _mm256_set1_epi32(pairs[1]);
            HOP_UNROLL
            for (int half = 0; half < 2; ++half) {
                sums[i][half] = _mm256_add_epi32(sums[i][half], _mm256_madd_epi16(x, even[half]));
                sums[i][half] = _mm256_add_epi32(sums[i][half], _mm256_madd_epi16(y, odd[half]));
            }
        }
    }

    // Like `quad`, with widened codes.
    template <int N>
    HOP_INLINED static void quad_of_words(const uint8_t* a, const uint8_t* words, int at, Vector (&sums)[N][2]) {
        const __m256i* w = reinterpret_cast<const __m256i*>(words + at * 128);
        const __m256i even[2] = {_mm256_load_si256(w), _mm256_load_si256(w + 2)};
        const __m256i odd[2] = {_mm256_load_si256(w + 1), _mm256_load_si256(w + 3)};
        add_products(a, at, even, odd, sums);
    }

    template <int N>
    HOP_INLINED static void quad(const uint8_t* a, const uint8_t* b, int at, Vector (&sums)[N][2]) {
        __m256i even[2], odd[2];
        HOP_UNROLL
        for (int half = 0; half < 2; ++half) {
            const __m256i codes = load256(b + at * 64 + half * 32);
            even[half] = _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 8);
            odd[half] = _mm256_srai_epi16(codes, 8);
        }
        add_products(a, at, even, odd, sums);
    }
};

template <class Numbers>
class Avx2 : public Numbers {
public:
    using Sum = typename Numbers::Sum;
    using Vector = typename Numbers::Vector;
    using Numbers::kBytes, Numbers::kLhsBytes;
    static constexpr bool kFewRows = false, kKept = false;
    static constexpr int64_t kFetched = int64_t(1) << 40;

    Avx2(int, int quads) : quads_(quads) {}
    void reads_codes(bool yes) { fetches_ = yes; }

    template <int R, class Between>
    void multiply(const uint8_t* a, const uint8_t* b, int rows, int64_t slices, Sum* sums, bool add, Between& between) {
        if constexpr (Numbers::kWidens)
            if (rows > kWidensFrom) return multiply_widened(a, R * kLhsBytes * kTile, b, rows, slices, sums, add, between);
        blocks(rows, [&](auto n, auto tiles, int first, int tile) {
            const auto once = [&] { if (first == 0 && tile == 0) between(); };
            block<n.value, tiles.value>(a + first * kRow, R * kLhsBytes * kTile, b + tile * kBytes * kTile, slices, 0, kQuads,
                                        sums + first * kBlock + tile * kRows, add, once);
        });
    }

    template <int R, class Between>
    void step(const uint8_t* a, const uint8_t* b, int rows, int quad, Sum* sums, Between&) {
        blocks(rows, [&](auto n, auto tiles, int first, int tile) {
            block<n.value, tiles.value>(a + first * kRow, 0, b + tile * kBytes * kTile, 1, quad, quads_,
                                        sums + first * kBlock + tile * kRows, false, [] {});
        });
    }

private:
    static constexpr int kRow = kLhsBytes * kSlice;
    static constexpr int kWidensFrom = 2 * Numbers::kMost;  // for more rows, codes are widened once in advance
    static constexpr int64_t kWidened = 4;                  // slices at a time: they fit in the first-level cache

    template <class Between>
    void multiply_widened(const uint8_t* a, int64_t stride, const uint8_t* b, int rows, int64_t slices, Sum* sums, bool add,
                          Between& between) {
        alignas(64) uint8_t words[kWidened * 2 * kTile];
        for (int tile = 0; tile < 2; ++tile)
            for (int64_t s = 0; s < slices; s += kWidened) {
                const int64_t count = slices - s < kWidened ? slices - s : kWidened;
                for (int64_t i = 0; i < count; ++i) {
                    const uint8_t* codes = b + (2 * (s + i) + tile) * kTile;
                    for (int q = 0; fetches_ && tile == 0 && q < kQuads; ++q)
                        fetch_in_order(codes + q * 128), fetch_in_order(codes + q * 128 + 64);
                    Numbers::widen(codes, words + i * 2 * kTile);
                    if (tile == 0) between();
                }
                in_row_blocks<Numbers::kMost>(rows, [&](auto n, int first) {
                    block_of_words<n.value>(a + first * kRow + s * stride, stride, words, count,
                                            sums + first * kBlock + tile * kRows, add || s > 0);
                });
            }
    }

    template <int N>
    static void block_of_words(const uint8_t* a, int64_t stride, const uint8_t* words, int64_t slices, Sum* sums, bool add) {
        Vector c[N][2];
        HOP_UNROLL
        for (int i = 0; i < N; ++i) {
            HOP_UNROLL
            for (int half = 0; half < 2; ++half) c[i][half] = add ? Numbers::load(sums + i * kBlock + half * 8) : Numbers::zero();
        }
        for (; slices > 0; --slices, a += stride, words += 2 * kTile) {
            HOP_UNROLL_BY_TWO
            for (int q = 0; q < kQuads; ++q) Numbers::template quad_of_words<N>(a, words, q, c);
        }
        HOP_UNROLL
        for (int i = 0; i < N; ++i) {
            HOP_UNROLL
            for (int half = 0; half < 2; ++half) Numbers::store(sums + i * kBlock + half * 8, c[i][half]);
        }
    }

    // One or two rows process both tiles of a slice, so that codes are read from memory in order. For more rows, the
    // registers hold the sums for only one tile.
    template <class Body>
    static void blocks(int rows, Body body) {
        in_row_blocks<Numbers::kMost>(rows, [&](auto n, int first) {
            constexpr int tiles = n.value <= 2 ? 2 : 1;
            for (int tile = 0; tile < 2; tile += tiles) body(n, std::integral_constant<int, tiles>(), first, tile);
        });
    }

    // Multiplies N rows by the 16 columns of each of T tiles.
    template <int N, int T, class Between>
    void block(const uint8_t* a, int64_t stride, const uint8_t* b, int64_t slices, int quad, int quads,
               Sum* sums, bool add, const Between& between) {
        const bool fetches = kBytes == 1 && fetches_;
        Vector c[T][N][2];
        HOP_UNROLL
        for (int tile = 0; tile < T; ++tile) {
            HOP_UNROLL
            for (int i = 0; i < N; ++i) {
                HOP_UNROLL
                for (int half = 0; half < 2; ++half)
                    c[tile][i][half] = add ? Numbers::load(sums + i * kBlock + tile * kRows + half * 8) : Numbers::zero();
            }
        }
        for (; slices > 0; --slices, a += stride, b += 2 * kBytes * kTile) {
            HOP_UNROLL
            for (int tile = 0; tile < T; ++tile) {
                const uint8_t* codes = b + tile * kBytes * kTile;
                HOP_UNROLL_BY_TWO
                for (int q = quad; q < quad + quads; ++q) {
                    if (fetches) {
                        fetch_in_order(codes + q * 64 * (3 - T));
                        if (T == 1) fetch_in_order(codes + q * 128 + 64);
                    }
                    Numbers::template quad<N>(a, codes, q, c[tile]);
                }
            }
            between();
        }
        HOP_UNROLL
        for (int tile = 0; tile < T; ++tile) {
            HOP_UNROLL
            for (int i = 0; i < N; ++i) {
                HOP_UNROLL
                for (int half = 0; half < 2; ++half) Numbers::store(sums + i * kBlock + tile * kRows + half * 8, c[tile][i][half]);
            }
        }
    }

protected:
    int quads_;
    bool fetches_ = false;
};
