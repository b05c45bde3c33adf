#include "quantize/elements.h"
#include "quantize/strip.h"
#include "quantize/run.h"
#include "quantize/decoding.h"
#include HOP_WIDE_OR_PLAIN(quantize/noise)
#include "update/run.h"
#if defined(HOP_IN_AVX512)
#include "update/adam_avx512.h"
#else
#include "update/plain.h"
#endif
#include "update/all.h"
