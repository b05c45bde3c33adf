// Compiles HOP_CODE for each level in turn (level.h), for small kernels.
#include "common/level_portable.h"

#include "common/level_avx2.h"
#include "common/level_avx512.h"
