// Scales of blocks and codes of elements, at one level.
#include "quantize/numbers.h"
#include "quantize/stats.h"
#include "quantize/scales.h"
#include "quantize/encode.h"
#if defined(HOP_IN_AVX512)
#include "common/bytes_avx512.h"
#include "quantize/avx512.h"
#include "quantize/codes_avx512.h"
#include "quantize/words_avx512.h"
#include "quantize/book_avx512.h"
#include "quantize/choose_avx512.h"
#include "quantize/codes_with_noise_avx512.h"
#include "quantize/stats_avx512.h"
#elif defined(HOP_IN_AVX2)
#include "quantize/avx2.h"
#else
#include "quantize/plain.h"
#endif
#include "quantize/measure.h"
