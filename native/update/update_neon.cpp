#include "update/update.h"

#define HOP_CODE "update/code.h"
#include "common/level_neon.h"
