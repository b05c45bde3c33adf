#include "rows/rows.h"

#define HOP_CODE "rows/code.h"
#include "common/level_portable.h"
