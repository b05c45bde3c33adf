#include "torch/quantizer.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "torch/factor.h"

namespace hop::torch {
namespace {

constexpr std::string_view kKinds[] = {"integer", "float", "codebook"};
constexpr std::string_view kRules[] = {"given", "amax", "minmax", "absmean", "current", "microscaling", "two_level"};
// Blocks of up to this many columns must begin at whole bytes, because kernels process several at a time.
constexpr int64_t kColumns = 512;
constexpr int kMostCodes = 256, kPadded = 272;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

bool QuantizerDescription::read(Words& words) {
    const struct {
        std::string_view name;
        int32_t* field;
    } integers[] = {
        {"bits", &q.bits}, {"low", &q.low}, {"high", &q.high}, {"zero", &q.zero}, {"mantissa_bits", &q.mantissa_bits},
        {"bias", &q.bias}, {"largest", &q.largest}, {"keeps_nan", &q.keeps_nan}, {"zero_code", &q.zero_code},
        {"affine", &q.affine}, {"power_of_two", &q.power_of_two}, {"most_of_dtype", &q.most_of_dtype},
        {"rounding", &q.rounding}, {"largest_power", &q.largest_power}};
    const struct {
        std::string_view name;
        float* field;
    } reals[] = {{"floor", &q.floor}, {"range", &q.range}, {"inverse", &q.inverse}, {"top", &q.top}, {"inverse_top", &q.inverse_top}};
    for (const auto& [name, field] : integers)
        if (words.name == name) {
            const int64_t value = words.integer();
            if (value < -4096 || value > 4096) words.refuse();
            *field = static_cast<int32_t>(value);
            return true;
        }
    for (const auto& [name, field] : reals)
        if (words.name == name) {
            *field = words.real();
            return true;
        }
    if (words.name == "codes") codes = words.one_of(words.value, kFormats, kFormatCount);
    else if (words.name == "scale") scale = words.one_of(words.value, kFormats, kFormatCount);
    else if (words.name == "result") result = words.one_of(words.value, kFormats, kFormatCount);
    else if (words.name == "rule") q.rule = words.one_of(words.value, kRules, 7);
    else if (words.name == "block") block = words.block();
    else if (words.name == "outer") outer = words.block();
    else if (words.word == "flat") flat = true;
    else if (words.name == "thresholds") thresholds_ = words.reals(kMostCodes);
    else if (words.name == "numbers") numbers_ = words.reals(kMostCodes);
    else return false;
    return true;
}

QuantizerDescription::QuantizerDescription(Words words) {
    if (!words.next()) fail("the description ends before the kind of format");
    q.format = words.one_of(words.word, kKinds, 3);
    while (words.next())
        if (!read(words)) words.refuse();
    check(words);
    if (q.format != HOP_CODEBOOK) return;
    q.size = static_cast<int32_t>(numbers_.size());
    for (std::vector<float>* list : {&thresholds_, &numbers_}) list->resize(kPadded, std::numeric_limits<float>::quiet_NaN());
    q.thresholds = thresholds_.data(), q.numbers = numbers_.data();
    tables_.resize(HOP_TABLES_SIZE);
    hop_codebook_tables(q.thresholds, q.numbers, q.size, tables_.data());
    q.tables = tables_.data();
    index_.resize(HOP_INDEX_SIZE + 4);  // four bytes are read at a time
    if (q.size > 16 && hop_codebook_index(q.thresholds, q.size, index_.data()) == HOP_OK) q.index = index_.data();
}

// Checks the fields that the kernels rely on.
void QuantizerDescription::check(const Words& words) {
    const auto need = [&](bool holds, const char* rule) {
        if (!holds) fail(std::string(rule) + "; got '" + std::string(words.text()) + "'");
    };
    need(q.bits >= 1 && q.bits <= 8, "a format has 1 to 8 bits");
    need(codes == HOP_INT8 || codes == HOP_UINT8 || codes == HOP_E4M3 || codes == HOP_E5M2, "codes are int8, uint8, e4m3 or e5m2");
    need(scale == HOP_FLOAT32 || scale == HOP_UINT8 || scale == HOP_E4M3, "scales are float32, uint8 or e4m3");
    need((scale == HOP_FLOAT32) == (q.rule != HOP_MICROSCALING && q.rule != HOP_TWO_LEVEL), "scales of microscaling and two_level are uint8 or e4m3, those of other rules float32");
    need(!block.empty(), "a quantizer needs a block");
    need(!flat || block.size() == 1, "a flat block has one size");
    need(q.rule != HOP_TWO_LEVEL || !outer.empty(), "two_level needs an outer block");
    need(scale != HOP_E4M3 || q.rule == HOP_TWO_LEVEL, "only two_level has e4m3 scales");
    need(outer.empty() || q.rule == HOP_TWO_LEVEL, "only two_level has an outer block");
    bool whole = true;
    for (const int64_t size : outer) whole = whole && size == -1;
    need(whole || outer == Sizes{1, -1}, "the outer block is the tensor or a row");
    need(q.format == HOP_FLOAT || q.rule < HOP_CURRENT_SCALING, "current, microscaling and two_level need a float format");
    need(q.affine == 0 || q.affine == 1, "affine is 0 or 1");
    need(q.affine == 0 || q.format == HOP_INTEGER, "only integer formats have zero points");
    need(q.rule == HOP_GIVEN || q.affine == (q.rule == HOP_MINMAX), "minmax finds zero points, other rules do not");
    need(q.rounding >= HOP_MX_RCEIL && q.rounding <= HOP_MX_EVEN, "rounding is 0 to 3");
    const int32_t count = 1 << q.bits;
    if (q.format == HOP_INTEGER) {
        const int32_t least = codes == HOP_INT8 ? -count / 2 : 0;
        need(codes == HOP_INT8 || codes == HOP_UINT8, "codes of integers are int8 or uint8");
        need(least <= q.low && q.low <= q.high && q.high < least + count, "low to high must fit into the format's bits");
        need(q.zero >= q.low && q.zero <= q.high, "zero must be from low to high");
    } else if (q.format == HOP_FLOAT) {
        need(codes != HOP_INT8 && q.mantissa_bits >= 1 && q.mantissa_bits < q.bits, "mantissa_bits must be from 1 to bits - 1, and codes not int8");
        need(q.largest >= 0 && q.largest < count, "largest must be a code");
        need(q.bias >= -256 && q.bias <= 256, "bias must be from -256 to 256");
    } else {
        need(codes == HOP_UINT8, "codes of a codebook are uint8");
        need(numbers_.size() == thresholds_.size() && !numbers_.empty() && static_cast<int32_t>(numbers_.size()) <= count, "a codebook needs as many numbers as thresholds, at most one per code");
        need(q.zero_code >= 0 && q.zero_code < static_cast<int32_t>(numbers_.size()), "zero_code must be a code");
    }
    q.outer_rows = outer == Sizes{1, -1};
    bool in_rows = block.size() > 1 || block[0] != -1;
    for (size_t d = 0; d + 1 < block.size(); ++d) in_rows = in_rows && block[d] == 1;
    need(!q.outer_rows || in_rows, "blocks must be within a row if each row has an amax");
}

Sizes QuantizerDescription::rows(const Sizes& shape) const {
    if (!flat) return shape;
    int64_t n = 1;
    for (const int64_t size : shape) n *= size;
    return {n};
}

Sizes QuantizerDescription::codes_shape(const Sizes& shape) const {
    if (per_byte() == 1) return shape;
    Sizes packed = rows(shape);
    if (packed.empty()) packed = {1};
    packed.back() = ceil_div(packed.back(), per_byte());
    return packed;
}

Sizes QuantizerDescription::scale_shape(const Sizes& shape) const { return counts(rows(shape), block); }
Sizes QuantizerDescription::second_shape(const Sizes& shape) const {
    return counts(rows(shape), q.rule == HOP_TWO_LEVEL ? outer : block);
}

const char* QuantizerDescription::cut(const Sizes& shape, int64_t row_stride, hop_blocks& made) const {
    Sizes own = rows(shape);
    if (own.empty()) own = {1};
    const Sizes sizes = per_dimension(block, own.size());
    struct Dimension {
        int64_t n, b;
    };
    const auto dimension = [&](size_t d) {
        const int64_t b = sizes[d] == -1 || sizes[d] > own[d] ? own[d] : sizes[d];
        return Dimension{own[d], b};
    };
    std::vector<Dimension> lead;  // adjacent dimensions are merged where blocks allow it
    for (size_t d = 0; d + 1 < own.size(); ++d) {
        const Dimension next = dimension(d);
        if (next.n == 1) continue;
        if (!lead.empty() && (next.b == next.n || (lead.back().b == 1 && next.n % next.b == 0))) {
            lead.back().n *= next.n;
            lead.back().b *= next.b;
        } else {
            lead.push_back(next);
        }
    }
    if (lead.size() > 2 || (lead.size() == 2 && lead[0].b != 1)) return "for blocks of at most two dimensions";
    auto [cols, tile_cols] = dimension(own.size() - 1);
    int64_t batch = lead.size() > 1 ? lead[0].n : 1;
    auto [count, tile_rows] = lead.empty() ? Dimension{1, 1} : lead.back();
    if (q.outer_rows && tile_rows != 1) return "for blocks within a row if each row has an amax";
    if (!row_stride && cols % per_byte() == 0 && !q.outer_rows && count % tile_rows == 0) {
        if (tile_cols == cols) {  // whole rows
            cols = batch * count * cols, tile_cols = tile_rows * tile_cols;
            batch = count = tile_rows = 1;
        } else if (tile_rows == 1 && cols % tile_cols == 0) {
            cols = batch * count * cols;
            batch = count = 1;
        }
    }
    if (tile_cols % per_byte() != 0 && kColumns < tile_cols && tile_cols < cols) return "for blocks that begin at a whole byte";
    made = {batch, count, cols, tile_rows, tile_cols, row_stride ? row_stride : cols};
    return nullptr;
}

}  // namespace hop::torch
