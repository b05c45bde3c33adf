// Row operations (rows.h) at one level.
namespace {
#include "quantize/elements.h"
#include "rows/sums.h"
#include "rows/norm.h"
#include "rows/each.h"
#include "rows/softmax.h"
#include HOP_WIDE_OR_PLAIN(rows/hadamard)
#include "rows/hadamard.h"
#include HOP_HEADER(rows/functions)
#include "rows/run.h"
}  // namespace

int compute_rows(RowsCall c, const void* weight, const void* bias) {
    const int64_t n = c.r.length;
    std::unique_ptr<float[]> wide;
    if (weight || bias) {
        wide.reset(new (std::nothrow) float[size_t(2 * n)]);
        if (!wide) return HOP_NO_MEMORY;
        if (weight) widen_any(c.r.weight_dtype, weight, n, wide.get()), c.weight = wide.get();
        if (bias) widen_any(c.r.bias_dtype, bias, n, wide.get() + n), c.bias = wide.get() + n;
    }
    const bool is_function = c.r.operation == HOP_FUNCTION || c.r.operation == HOP_GATED;
    if (is_function && c.r.dtype != HOP_F32 && c.r.function < kFunctions) {
        c.table = functions::table(Function(c.r.function), c.r.dtype);
        if (!c.table) return HOP_NO_MEMORY;
    }
    switch (c.r.dtype) {
        case HOP_F32: return compute_all<F32>(c);
        case HOP_BF16: return compute_all<BF16>(c);
        case HOP_F16: return compute_all<F16>(c);
        default: return HOP_UNSUPPORTED;
    }
}
