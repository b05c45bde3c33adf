#include "groups/groups.h"

#define HOP_CODE "groups/integers_code.h"
#include "common/level_avx2.h"
