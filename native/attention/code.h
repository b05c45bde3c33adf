#include "quantize/numbers.h"
#include "gemm/row_blocks.h"
#include "attention/lanes.h"
#include HOP_HEADER(attention/dots)
namespace functions_here {
#include "functions/code.h"
}  // namespace functions_here
#include "attention/pack.h"
#include "attention/probabilities.h"
#include "attention/run.h"
