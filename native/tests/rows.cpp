// A row of a product must not depend on the other rows: random float products are repeated with some rows removed, and
// compared bit for bit. Arguments: a seed, and the number of products.
#include <cstdio>

#include "product_case.h"
#include "threads.h"

namespace {

bool multiply(const Case& c, const hop_product& p, int64_t first, char* output) {
    const int64_t offset = first * c.lhs.o.row_stride * bytes_of(c.lhs.o.format) / (narrow(c.lhs.o.format) ? 2 : 1);
    const hop_data lhs{c.lhs.codes.data() + offset, c.lhs.scale.data.data(), nullptr, nullptr, nullptr};
    const hop_data rhs{c.rhs.data(), c.rhs.scale.data.data(), c.rhs.zero.data(), c.rhs.fold.data.data(), nullptr};
    return hop_multiply(&p, 2, &lhs, &rhs, c.bias.data(), nullptr, nullptr, output) == HOP_OK;
}

// Whether two rows of `n` elements have the same bits. NaNs are all equal: compilers choose which operand of an
// instruction provides the payload.
bool equal(int format, const char* a, const char* b, int64_t n) {
    const int unit = bytes_of(format);
    for (int64_t i = 0; i < n; ++i) {
        if (std::memcmp(a + i * unit, b + i * unit, static_cast<size_t>(unit)) == 0) continue;
        if (!std::isnan(element(format, a, i)) || !std::isnan(element(format, b, i))) return false;
    }
    return true;
}

// Multiplies all rows at once, and then some of them again.
bool same(uint64_t seed, int level, int64_t& compared) {
    Chance chance(seed);
    Case c;
    if (!random_case(chance, c) || c.integers || c.codes || c.p.m < 2 || c.p.batch > 1) return true;
    c.p.lhs.scale.format = c.p.lhs.fold.format = HOP_NONE;  // scales per row: their indices would change
    if (hop_product_declines(&c.p)) return true;
    hop_use_level(level);
    if (c.rhs.o.layout == HOP_TILED) {
        hop_operand o = c.rhs.o;
        o.layout = HOP_STRIDED;
        hop_pack(&o, c.p.n, c.p.k, 1, c.rhs.codes.data(), c.rhs.tiled.data());
    }
    const int64_t unit = bytes_of(c.p.output.format), stride = c.p.output.row_stride * unit;
    std::vector<char> all(static_cast<size_t>(c.p.m * stride)), some(all.size());
    if (!multiply(c, c.p, 0, all.data())) return false;
    for (int turn = 0; turn < 4; ++turn) {
        hop_product p = c.p;
        p.m = turn == 0 ? 1 : 1 + chance.below(c.p.m);
        const int64_t first = chance.below(c.p.m - p.m + 1);
        if (!multiply(c, p, first, some.data())) return false;
        for (int64_t i = 0; i < p.m; ++i)
            if (!equal(c.p.output.format, some.data() + i * stride, all.data() + (first + i) * stride, c.p.n))
                return std::printf("level %d, seed %lu: row %ld differs, of %ld from %ld on: %s\n", level,
                                   static_cast<unsigned long>(seed), long(first + i), long(p.m), long(first), c.text.c_str()),
                       false;
        compared += p.m * c.p.n;
    }
    return true;
}

}  // namespace

int main(int count, char** arguments) {
    const uint64_t seed = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 0;
    const uint64_t cases = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 4000;
    int wrong = 0;
    int64_t compared = 0;
    for (uint64_t i = 0; i < cases && wrong < 20; ++i)
        for (int level = 0; level <= hop_best_level(); ++level) wrong += hop_has_level(level) && !same(seed + i, level, compared);
    std::printf("%s, %ld elements compared\n", wrong ? "wrong" : "all rows are the same", long(compared));
    return wrong != 0;
}
