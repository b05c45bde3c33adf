#include "quantize/elements.h"
#include HOP_WIDE_OR_PLAIN(quantize/noise)
#include "common/transpose.h"
#include "common/transpose_lines.h"
#include "quantize/strip.h"
#include "quantize/run.h"
#include "quantize/product.h"
