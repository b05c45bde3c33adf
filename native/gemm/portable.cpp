// Products in portable C++. Integers are multiplied as float32, in which sums over a slice are exact.
#include <atomic>
#include <cstring>
#include <type_traits>

#include "common/cpu.h"
#include "gemm/product.h"

#include "common/isa.h"

namespace hop {
namespace portable {

#include "gemm/engine_portable.h"

int integers(Job& job) { return Multiplication<Portable<Int8>>(job).run(); }
int floats(Job& job) { return Multiplication<Portable<Bfloat16>>(job).run(); }

}  // namespace portable

void pack_tile(const hop_operand& o, const void* codes, int64_t rows, int64_t k, int64_t first, int64_t slice,
               uint8_t* tile) {
#if HOP_HAS_AVX512
    if (level() >= Level::avx512) return avx512::pack_tile(o, codes, rows, k, first, slice, tile);
#endif
    const uint8_t* made = portable::tile_of_codes(o, codes, rows, k, first, slice, tile);
    if (made != tile) std::memcpy(tile, made, kTile);
}

}  // namespace hop
