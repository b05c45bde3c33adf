#include "attention/attention.h"

#define HOP_CODE "attention/code.h"
#include "common/level_avx_vnni.h"
