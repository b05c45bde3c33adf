// Includes HOP_CODE for each level in turn (level.h): of kernels that are small.
#include "common/level_portable.h"

#include "common/level_avx2.h"
#include "common/level_avx512.h"
