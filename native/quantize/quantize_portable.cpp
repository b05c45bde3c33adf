#include "quantize/quantize.h"

#define HOP_CODE "quantize/quantize_code.h"
#include "common/level_portable.h"
