// Elementary functions of a level.
#include HOP_HEADER(functions/lanes)
#include "functions/evaluate.h"
#if defined(HOP_IN_AVX512)
#include "functions/exp_avx512.h"
#else
#include "functions/exp_doubles.h"
#endif
