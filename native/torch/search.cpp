// hop_native::search_scales.
#include "search/search.h"

#include <cstring>

#include "hop.h"
#include "torch/description.h"
#include "torch/operators.h"

namespace hop::torch {
namespace {

constexpr size_t kMostCandidates = 64;

// "1 code block=16 bits=16 low=0 high=0 last=126 factor=0 slack=1065353216 e2m1 candidates=0,1065353216": the kind of search,
// the block, the bits of units, the format of elements, and the candidates. Reals are written as their bits.
struct SearchDescription {
    Search s{};
    std::vector<float> candidates;

    explicit SearchDescription(const std::string& text) {
        constexpr std::string_view kinds[] = {"scale", "affine", "code"};
        Words words(text);
        if (!words.next()) fail("the description ends before the kind of search");
        s.kind = static_cast<Searched>(words.one_of(words.word, kinds, 3));
        s.bits = -1, s.factor = s.slack = 1.0f;
        while (words.next()) {
            if (words.name == "block") s.block = words.integer(1, kMostSearched);
            else if (words.name == "bits") s.bits = words.integer(0, kMostSearchBits);
            else if (words.name == "low") s.low = static_cast<float>(words.integer(-128, 0));
            else if (words.name == "high") s.high = static_cast<float>(words.integer(0, 255));
            else if (words.name == "last") s.last = words.integer(0, 255);
            else if (words.name == "factor") s.factor = words.real();
            else if (words.name == "slack") s.slack = words.real();
            else if (words.name == "candidates") candidates = words.reals(kMostCandidates);
            else if (words.word == "e2m1") s.e2m1 = true;
            else words.refuse();
        }
        if (!s.block || s.bits < 0 || candidates.empty()) fail("a search needs block, bits and candidates, got '" + text + "'");
        for (const float c : candidates)
            if (!(c >= -512.0f && c <= 512.0f)) fail("candidates must be from -512 to 512, got '" + text + "'");
        s.candidates = candidates.data(), s.count = static_cast<int32_t>(candidates.size());
    }
};

void expect_plain(const View& v, const Sizes& shape, int format) {
    if (v.format() != format || !v.is_contiguous() || Sizes(v.sizes, v.sizes + v.dim) != shape)
        fail(std::string(v.name) + " must be contiguous, of shape " + to_string(shape) + "; got shape " + v.shape());
}

// Returns a writable copy.
Tensor copy_of(const View& v, size_t bytes) {
    Tensor made = empty(Sizes(v.sizes, v.sizes + v.dim), v.dtype);
    if (v.numel()) std::memcpy(data_of(made), v.data, static_cast<size_t>(v.numel()) * bytes);
    return made;
}

}  // namespace

void search_scales(StableIValue* values, uint64_t count) {
    Stack stack(values, count);
    const Tensor x = stack.tensor(), scale = stack.tensor(), zero_point = stack.optional(), outer = stack.optional(),
                 table = stack.optional();
    static Parsed<SearchDescription> known;
    const auto description = known(stack.text());
    Search s = description->s;

    const View of_x = view("x", x), of_scale = view("scale", scale), of_zero = view("zero_point", zero_point),
               of_outer = view("outer", outer), of_table = view("values", table);
    const bool is_code = s.kind == Searched::code;
    if (of_x.dim != 2) fail("x must be a matrix, got shape " + of_x.shape());
    s.rows = of_x.size(0), s.cols = of_x.size(1);
    expect_plain(of_x, {s.rows, s.cols}, HOP_FLOAT32);
    const Sizes blocks{s.rows, (s.cols + s.block - 1) / s.block};
    expect_plain(of_scale, blocks, is_code ? HOP_UINT8 : HOP_FLOAT32);
    if (bool(of_zero) != (s.kind == Searched::affine)) fail("an affine search needs zero_point, other searches take none");
    if (of_zero) expect_plain(of_zero, blocks, HOP_FLOAT32);
    if (bool(of_table) != is_code || (of_outer && !is_code)) fail("a search of scale codes needs values and may take outer, other searches take neither");
    if (of_table) expect_plain(of_table, {256}, HOP_FLOAT32);
    if (of_outer) {
        if (of_outer.dim != 1) fail("outer must be one-dimensional, got shape " + of_outer.shape());
        expect_plain(of_outer, {of_outer.size(0) == 1 ? 1 : s.rows}, HOP_FLOAT32);
        s.outer_stride = of_outer.size(0) == 1 ? 0 : 1;
    }

    std::vector<Tensor> made;
    made.push_back(copy_of(of_scale, is_code ? 1 : sizeof(float)));
    if (of_zero) made.push_back(copy_of(of_zero, sizeof(float)));
    s.x = static_cast<const float*>(of_x.data), s.outer = static_cast<const float*>(of_outer.data);
    s.values = static_cast<const float*>(of_table.data);
    if (is_code) s.codes = static_cast<uint8_t*>(data_of(made[0]));
    else s.scale = static_cast<float*>(data_of(made[0]));
    if (of_zero) s.zero_point = static_cast<float*>(data_of(made[1]));
    if (of_x.numel()) hop::search_scales(s, threads());
    stack.give(std::move(made));
}

}  // namespace hop::torch
