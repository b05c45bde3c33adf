#include "gemm/few_sums.h"

#define HOP_CODE "gemm/few_sums_code.h"
#include "common/level_portable.h"

#include "common/level_avx2.h"
