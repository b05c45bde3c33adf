// Decodes codes at one level; include quantize/numbers.h and, with AVX-512, common/bytes_avx512.h first.
#include "quantize/lines.h"
#include "quantize/dequantize_decode.h"
#if defined(HOP_IN_NEON)
#include "common/bytes_neon.h"
#include "quantize/dequantize_neon.h"
#else
#include HOP_HEADER(quantize/dequantize)
#endif
#include "quantize/dequantize_run.h"
