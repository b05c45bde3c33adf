// Data structures of products that all instruction sets share.
//
//     y[m, n] = Σ over groups of k  s_lhs[m, g] · s_rhs[n, g] · Σ over k in g  lhs[m, k] · rhs[n, k]
//
// A slice is 64 successive k, a quad 4 of them. A tile is one slice of 16 rows:
//
//     of codes       [16 quads][16 rows][4] bytes                     rhs, and packed factors
//                    [16 rows][64] bytes                              lhs
//     of int8        the same, minus a constant that becomes part of the zero point
//     of bfloat16    two such, for k 0 and 2 of each quad, and for k 1 and 3: [16 quads][16 rows][2], [16 rows][32]
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/cpu.h"
#include "hop.h"
#include "common/parallel.h"

namespace hop {

constexpr int kSlice = 64, kRows = 16, kQuads = 16, kTile = kSlice * kRows;
constexpr int kBlock = 2 * kRows;  // rows of lhs, and of rhs, that are multiplied at a time
constexpr int64_t kChunkBytes = 16 << 10;  // bytes of tiles of rhs, which stay in the first-level cache

// The low and high bytes of each code's bfloat16 value.
struct Decoder {
    uint8_t low[256], high[256];
    int codes;    // entries in use: 64, 128 (and a sign in the highest bit) or 256
    int special;  // magnitudes from here on are infinite or NaN; 256 if none
};

// Prefetches a line of packed codes at some distance after `at`. Reading two tiles alternately creates two streams, for
// which CPUs may prefetch too little: Zen 5 then reads at a third of the memory bandwidth. Lines are therefore
// prefetched in address order. (always_inline: GCC assumes that a function with only prefetches has no effect, and
// removes its calls.)
inline __attribute__((always_inline)) void fetch_in_order(const uint8_t* at) {
    constexpr int64_t ahead = 8 << 10;  // shorter distances run out while the scales of many groups are computed
    __builtin_prefetch(at + ahead, 0, 3);
}

// The values that `vectors` successive vectors of 16 quads share, one for each quad; the values of the next vectors
// follow at `stride`.
template <class T>
struct PerQuads {
    const T* numbers = nullptr;  // nullptr: none
    int vectors = 1, stride = 0;
    const T* at(int vector) const { return numbers ? numbers + vector / vectors * stride : nullptr; }
};

const Decoder* decoder(int format);  // for formats of at most a byte
const Decoder* shifted_decoder();    // for code - 16: 4-bit codes minus a zero point
const float* scale_table(int format);  // the values of HOP_E8M0 or HOP_E4M3

inline bool is_narrow(int format) { return format == HOP_INT4 || format == HOP_UINT4 || format == HOP_E2M1; }
inline bool is_integer(int format) {
    return format == HOP_INT8 || format == HOP_UINT8 || format == HOP_INT4 || format == HOP_UINT4;
}
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A call and the values derived from it.
struct Job {
    hop_product p;
    hop_data lhs, rhs;
    const void *bias, *output_scale, *output_zero;
    void* output;
    int threads;

    int64_t slices;    // slices of k
    int64_t group;     // number of k that share scales; all k if there is one group
    int64_t groups;
    int32_t shift = 0;  // constant that an engine needs added to int8 codes of lhs: 128 makes them unsigned
    int32_t rhs_shift = 0;  // the same for rhs: 8 makes int4 unsigned

    Job(const hop_product& product, int threads);
    bool grouped() const { return groups > 1; }
    int64_t terms(int64_t index) const {  // number of terms in a sum of this group
        const int64_t rest = p.k - index * group;
        return rest < group ? rest : group;
    }
};

// Whether the product is computed with integers.
inline bool by_integers(const hop_product& p) { return is_integer(p.lhs.format) && is_integer(p.rhs.format); }

// Integer and float products, for each instruction set.
namespace amx { int integers(Job&); int floats(Job&); }
namespace avx512_bf16 { int floats(Job&); }  // integers by avx512
namespace avx512 { int integers(Job&); }  // floats by avx512_plain
namespace avx512_plain { int integers(Job&); int floats(Job&); }
namespace avx_vnni { int integers(Job&); }  // floats by avx2
namespace avx2 { int integers(Job&); int floats(Job&); }
namespace neon_bf16 { int floats(Job&); }
namespace neon_i8mm { int integers(Job&); }
namespace neon_dotprod { int integers(Job&); }
namespace neon { int integers(Job&); int floats(Job&); }
namespace portable { int integers(Job&); int floats(Job&); }

// Packs the tile of codes of rows first..first + 15 in a slice.
namespace avx512 {
void pack_tile(const hop_operand& o, const void* codes, int64_t rows, int64_t k, int64_t first, int64_t slice, uint8_t* tile);
}
void pack_tile(const hop_operand& o, const void* codes, int64_t rows, int64_t k, int64_t first, int64_t slice, uint8_t* tile);

}  // namespace hop
