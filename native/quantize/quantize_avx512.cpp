#include "quantize/quantize.h"

#define HOP_CODE "quantize/quantize_code.h"
#include "common/level_avx512.h"
