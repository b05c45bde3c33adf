#include "update/update.h"

#define HOP_CODE "update/code.h"
#include "common/level_avx2.h"
