// Products of floats (groups.h) at one level.
namespace {
#include "common/rounding.h"
#include HOP_HEADER(groups/lanes)
#include "groups/weight.h"
#include "groups/floats.h"
}  // namespace

int multiply_floats(const GroupCall& call) {
    return multiply(call, by_form(call.p, [](auto form) {
        using F = decltype(form);
        return FormOfFloats{few_rows<F, 1>, few_rows<F, 2>, few_rows<F, kFewRows>, decode_rows<F>};
    }));
}
