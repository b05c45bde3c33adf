// Products of floats (groups.h) at one level.
namespace {
#include "common/rounding.h"
#include HOP_HEADER(groups/lanes)
#include "groups/weight.h"
#include "groups/floats.h"
}  // namespace

int multiply_floats(const GroupCall& call) {
    return multiply(call, by_form(call.p, [](auto form) { return form_of<decltype(form)>(); }));
}
