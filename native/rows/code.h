#include "quantize/elements.h"
#include "quantize/strip.h"
namespace functions_here {
#include "functions/code.h"
}  // namespace functions_here
#include "rows/sums.h"
#include "rows/norm.h"
#include "rows/each.h"
#include "rows/softmax.h"
#include HOP_WIDE_OR_PLAIN(rows/hadamard)
#include "rows/hadamard.h"
#include HOP_WIDE_OR_PLAIN(rows/gelu)
#include "rows/run.h"
