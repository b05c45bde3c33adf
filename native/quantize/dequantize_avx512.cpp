#include "quantize/quantize.h"

#define HOP_CODE "quantize/dequantize_code.h"
#include "common/level_avx512.h"
