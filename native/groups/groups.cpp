#include "groups/groups.h"

namespace hop {
namespace {

bool is_number(int32_t format) { return format == HOP_FLOAT32 || format == HOP_BFLOAT16 || format == HOP_FLOAT16; }

// Returns the reason why codes of x cannot be multiplied as integers, or null.
const char* declines_integers(const hop_group_product& p) {
    if (p.x_group < 0 || p.x_group % 32) return "for scales of x per row or per multiple of 32 elements";
    const int64_t own = p.x_group && p.x_group < p.k ? p.x_group : p.k, group = p.scales.group;
    const int64_t step = own < group ? own : group, whole = own < group ? group : own;
    if (whole % step && whole < p.k) return "for groups of one operand that are multiples of the other's";
    for (int code = 0; (p.bits == 2 || p.bits == 4) && code < 1 << p.bits; ++code) {
        const float number = p.numbers[code];
        if (!(number >= -128 && number <= 127) || number != static_cast<float>(static_cast<int>(number))) return "for values that are 8-bit integers";
    }
    return nullptr;
}

}  // namespace
}  // namespace hop

const char* hop_group_product_declines(const hop_group_product* product) {
    const hop_group_product& p = *product;
    const hop_group_scales& s = p.scales;
    if (p.bits < 2 || p.bits > 8 || p.bits == 7) return "for codes of 2 to 6 or 8 bits";
    if (p.bits == 8 && p.has_offset) return "for offsets with codes of 2 to 6 bits only";
    if (s.group != 16 && (s.group < 32 || s.group % 32)) return "for groups of 16, 32 or multiples of 32";
    if (p.k < 1 || p.k % 32 || p.k % s.group) return "for rows of whole groups and a multiple of 32 elements";
    if (s.outer_format != HOP_NONE && (s.outer < 0 || s.outer % s.group)) return "for outer scales over whole groups";
    const bool is_byte = s.format == HOP_INT8 || s.format == HOP_UINT8 || (s.format == HOP_E4M3 && s.numbers);
    if (!hop::is_number(s.format) && !is_byte) return "for scales in floats or bytes";
    if (s.outer_format != HOP_NONE && !hop::is_number(s.outer_format)) return "for outer scales in floats";
    if (p.x_format == HOP_INT8) {
        if (const char* reason = hop::declines_integers(p)) return reason;
    } else if (!hop::is_number(p.x_format)) {
        return "for float32, bfloat16, float16 and int8";
    }
    if (!hop::is_number(p.output_format)) return "for results in float32, bfloat16 or float16";
    if (p.bias_format != HOP_NONE && !hop::is_number(p.bias_format)) return "for a bias in float32, bfloat16 or float16";
    return nullptr;
}

int hop_multiply_groups(const hop_group_product* product, int threads, const void* x, const float* x_scale,
                        const hop_group_data* weight, const void* bias, void* y) {
    if (hop_group_product_declines(product)) return HOP_UNSUPPORTED;
    if (product->m == 0 || product->n == 0) return HOP_OK;
    const hop::GroupCall call{*product, x, x_scale, *weight, bias, y, threads};
    return product->x_format == HOP_INT8 ? HOP_BY_LEVEL(multiply_integers(call)) : HOP_BY_LEVEL(multiply_floats(call));
}
