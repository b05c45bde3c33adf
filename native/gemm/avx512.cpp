// Integer products with AVX-512 VNNI.
#include "gemm/product.h"

#if HOP_HAS_AVX512
#include <immintrin.h>

#include <atomic>
#include <cstring>
#include <type_traits>

#include "common/isa.h"

HOP_BEGIN_TARGET(HOP_TARGET_AVX512)
namespace hop {
namespace avx512 {

#include "gemm/engine_avx512.h"

int integers(Job& job) {
    job.shift = 128;
    return Multiplication<Avx512<Int8>>(job).run();
}

void pack_tile(const hop_operand& o, const void* codes, int64_t rows, int64_t k, int64_t first, int64_t slice,
               uint8_t* tile) {
    const uint8_t* made = tile_of_codes(o, codes, rows, k, first, slice, tile);
    if (made != tile) std::memcpy(tile, made, kTile);
}

}  // namespace avx512
}  // namespace hop
HOP_END_TARGET

#endif
