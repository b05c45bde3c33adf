#include "torch/factor.h"

namespace hop::torch {
namespace {

constexpr int64_t kWhole = int64_t(1) << 62;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Sizes counts_of(const Sizes& shape, const Sizes& sizes) {
    Sizes found(shape.size());
    for (size_t d = 0; d < shape.size(); ++d) found[d] = sizes[d] == -1 ? 1 : ceil_div(shape[d], sizes[d]);
    return found;
}

struct Line {
    int64_t block, count, stride;
};

bool is_whole(const Line& l) { return l.count == 1 || l.block == -1; }

// Describes the scales of a matrix, possibly with several dimensions of rows; false if a kernel cannot address them by
// row.
bool address(hop_scale& made, Sizes shape, Sizes sizes, Sizes count, bool columns) {
    const size_t last = shape.size() - 1;
    Line rows{-1, 1, 0}, along{sizes[last], count[last], 1};
    if (columns) {
        rows = {sizes[1], count[1], 1};
        along = {sizes[0], count[0], count[1]};
    } else {
        int64_t product = 1, lines = 0, cut = 0;
        for (size_t d = 0; d < last; ++d) {
            if (shape[d] == 1) continue;
            ++lines;
            product *= count[d];
            if (sizes[d] != 1) ++cut;
            if (count[d] != 1) rows.block = sizes[d];
        }
        if (product != 1) {
            if (cut && lines > 1) return false;
            rows = {cut ? rows.block : 1, product, count[last]};
        }
    }
    made.rows = is_whole(rows) ? kWhole : rows.block;
    made.row_stride = is_whole(rows) ? 0 : rows.stride;
    made.ks = is_whole(along) ? kWhole : along.block;
    made.k_stride = is_whole(along) ? 0 : along.stride;
    return true;
}

}  // namespace

Sizes per_dimension(const Sizes& block, size_t dim) {
    if (block.size() >= dim) return Sizes(block.end() - static_cast<int64_t>(dim), block.end());
    Sizes sizes(dim - block.size(), block[0] == -1 ? -1 : 1);
    sizes.insert(sizes.end(), block.begin(), block.end());
    return sizes;
}

bool FactorDescription::read(Words& words) {
    if (words.word == "tiled") tiled = true;
    else if (words.word == "columns") columns = true;
    else if (words.word == "sums") stores_sums = true;
    else if (words.name == "zero" && words.value == "stored") stores_zero = true;
    else if (words.name == "zero") zero = words.integer(-128, 255);
    else if (words.name == "scale") scale.format = HOP_FLOAT32, scale.block = words.block();
    else if (words.name == "factor") scale.factor = words.real();
    else if (words.name == "block_scale") {
        const size_t colon = words.value.find(':');
        if (colon == words.value.npos) words.refuse();
        block_scale.format = words.one_of(words.value.substr(0, colon), kFormats, kFormatCount);
        const int format = block_scale.format;
        if (format != HOP_E4M3 && format != HOP_E8M0 && format != HOP_FLOAT32) words.refuse();
        block_scale.block = words.block(static_cast<int64_t>(colon) + 1);
    } else {
        return false;
    }
    return true;
}

Sizes counts(const Sizes& shape, const Sizes& block) { return counts_of(shape, per_dimension(block, shape.size())); }

void expect(const View& x, const Sizes& shape, int format) {
    bool same = x && x.dim == static_cast<int64_t>(shape.size());
    for (size_t d = 0; same && d < shape.size(); ++d) same = x.sizes[d] == shape[d];
    if (!same)
        fail(std::string(x.name) + " must have shape " + to_string(shape) + (x ? ", got " + x.shape() : ", got none"));
    const int own = x.format();
    const bool is_byte = item_bytes(format) == 1 && (own == HOP_UINT8 || own == HOP_INT8) && format > HOP_UINT8;
    if (own != format && !is_byte)
        fail(std::string(x.name) + " must be " + std::string(kFormats[format]) + ", got dtype number " +
             std::to_string(x.dtype));
}

Factor make(const FactorDescription& d, const char* name, const Sizes& shape, bool batched, bool is_lhs,
            const Buffers& buffers) {
    Factor f;
    hop_operand& o = f.operand;
    const size_t first = batched ? 1 : 0, dim = shape.size() - first;
    const Sizes own(shape.begin() + static_cast<int64_t>(first), shape.end());
    const bool narrow = is_narrow(d.format);
    if (dim < 2 || (dim > 2 && (d.columns || d.tiled || !is_lhs))) fail(std::string(name) + " must be a matrix or a batch of matrices");
    if (d.stores_zero && d.scale.block.empty()) fail("the description of " + std::string(name) + " has zero points but no scales, whose blocks they share");
    f.batch = batched ? shape[0] : 1;
    f.k = d.columns ? own[0] : own[dim - 1];
    for (size_t i = 0; i + 1 < dim; ++i) f.rows *= own[i];
    if (d.columns) f.rows = own[1];
    o.format = d.format, o.layout = d.tiled ? HOP_TILED : HOP_STRIDED;
    const bool is_signed = d.format == HOP_INT8 || d.format == HOP_INT4;
    const int32_t zero_format = is_signed ? HOP_INT8 : HOP_UINT8;
    o.zero = d.zero, o.zero_format = d.stores_zero ? zero_format : HOP_NONE;

    // codes
    const View& codes = buffers.codes;
    o.row_stride = d.columns ? 1 : f.k, o.k_stride = d.columns ? f.rows : 1;
    f.steps.codes = f.rows * f.k * item_bytes(d.format) / (narrow ? 2 : 1);
    if (d.tiled) {
        if (codes) {
            expect(codes, {ceil_div(f.rows, 32), ceil_div(f.k, 64), 2, narrow ? 8 : 16, 64}, d.format);
            if (!codes.is_contiguous()) f.needs_copy = true;
        }
    } else {
        if (narrow && (d.columns || f.k % 2)) f.declined = "4-bit codes need an even number of elements in the summed dimension, and consecutive ones in a byte";
        if (codes && !f.declined) {
            Sizes stored = shape;
            if (narrow) stored.back() /= 2;
            expect(codes, stored, d.format);
            const int64_t per_byte = narrow ? 2 : 1;
            int64_t rows = 1;
            o.k_stride = codes.stride(d.columns ? -2 : -1);
            o.row_stride = codes.stride(d.columns ? -1 : -2) * per_byte;
            if (dim > 2) {  // rows in several dimensions
                bool any = false;
                for (int64_t i = codes.dim - 2; i >= static_cast<int64_t>(first); --i) {
                    if (codes.size(i) == 1) continue;
                    if (!any) o.row_stride = codes.stride(i) * per_byte;
                    else if (codes.stride(i) * per_byte != o.row_stride * rows) f.needs_copy = true;
                    any = true;
                    rows *= codes.size(i);
                }
            }
            if (f.k == 1 || codes.size(d.columns ? -2 : -1) == 1) o.k_stride = 1;
            if ((is_lhs || narrow) && o.k_stride != 1) f.needs_copy = true;
            if (batched) f.steps.codes = codes.stride(0) * item_bytes(d.format);
        }
    }
    f.data.codes = codes.data;

    // scales
    const auto lay = [&](const ScaleDescription& s, const View& x, int format, hop_scale& made, int64_t& step) {
        made = {HOP_NONE, 1, kWhole, kWhole, 0, 0};
        if (s.block.empty()) {
            if (x) fail(std::string(x.name) + " must be omitted, as the description has none");
            return;
        }
        const Sizes sizes = per_dimension(s.block, shape.size()), count = counts_of(shape, sizes);
        if (buffers.codes) expect(x, count, format);
        int64_t each = 1;
        for (size_t i = first; i < count.size(); ++i) each *= count[i];
        if (batched && count[0] != 1 && count[0] != shape[0]) f.declined = "scales are shared by some matrices of a batch but not by all";
        step = batched && count[0] != 1 ? each * item_bytes(format) : 0;
        made.format = s.format, made.factor = s.factor;
        const Sizes own_sizes(sizes.begin() + static_cast<int64_t>(first), sizes.end());
        const Sizes own_count(count.begin() + static_cast<int64_t>(first), count.end());
        if (!address(made, own, own_sizes, own_count, d.columns)) f.declined = "blocks of rows span several dimensions";
    };
    lay(d.scale, buffers.scale, d.scale.format, o.scale, f.steps.scale);
    lay(d.block_scale, buffers.block_scale, d.block_scale.format, o.fold, f.steps.fold);
    if (d.stores_zero) {
        hop_scale same;
        lay(d.scale, buffers.zero, zero_format, same, f.steps.zero);
    } else if (buffers.zero) {
        fail(std::string(buffers.zero.name) + " must be omitted, as the description has none");
    }
    if (d.stores_sums && (!d.tiled || is_lhs || d.format > HOP_UINT4)) fail("only a right factor of integers in tiles has sums");
    if (d.stores_sums && buffers.codes) expect(buffers.sums, d.columns ? Sizes{1, f.rows} : Sizes{f.rows, 1}, HOP_INT32);
    else if (buffers.sums) fail(std::string(buffers.sums.name) + " must be omitted, as the description has none");
    f.data.scale = buffers.scale.data, f.data.zero = buffers.zero.data, f.data.fold = buffers.block_scale.data;
    f.data.sums = static_cast<const int32_t*>(buffers.sums.data);
    return f;
}

}  // namespace hop::torch
