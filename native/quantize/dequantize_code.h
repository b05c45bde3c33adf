#include "quantize/numbers.h"
#if defined(HOP_IN_AVX512)
#include "common/bytes_avx512.h"
#endif
#include "quantize/decoding.h"
