// Headers that the engines of AArch64 share. Included in a namespace (isa.h), after the order of words (order_pairs.h,
// order_halves.h).
#include "common/bytes_neon.h"
#include "gemm/words_neon.h"
#include "gemm/scales.h"
#include "gemm/pack_lhs.h"
#include "gemm/pack_rhs.h"
#include "gemm/epilogue.h"
#include "gemm/groups_plain.h"
#include "gemm/finish_plain.h"
#include "gemm/requantize.h"
#include "gemm/gemm.h"
#include "gemm/row_blocks.h"

inline int8x16_t load_codes(const uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
