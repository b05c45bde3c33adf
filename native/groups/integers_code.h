// Products of codes (groups.h) at one level.
namespace {
#include "common/rounding.h"
#include "gemm/each.h"
#include HOP_HEADER(groups/lanes)
#include "groups/order.h"
#include HOP_HEADER(groups/integers)
#include "groups/weight.h"
#include "groups/codes_of_rows.h"
#include "groups/integers.h"
}  // namespace

int multiply_integers(const GroupCall& call) {
    return multiply(call, by_form(call.p, [](auto form) { return form_of<decltype(form)>(); }));
}
