// Finds the lines that the thresholds of a codebook are on: dynamic maps have one per decade, linear maps have one.
#include <cmath>
#include <cstring>
#include <vector>

#include "quantize/quantize.h"

namespace hop {
namespace {

constexpr int kLines = 16, kExponents = 32;

uint32_t bits(float x) {
    uint32_t b;
    std::memcpy(&b, &x, 4);
    return b;
}

float number(uint32_t b) {
    float x;
    std::memcpy(&x, &b, 4);
    return x;
}

// Parameters with which PieceCodes counts the thresholds that a magnitude reaches: slope * m + offset, at most limit,
// rounded.
struct Pieces {
    float begin[kExponents], slope[kLines] = {}, offset[kLines] = {}, limit[kLines] = {};

    // The rank, or -1 near a threshold; `off` is an error of the position, in units.
    int32_t rank(float m, int32_t off) const {
        m = m > kPieceLeast ? m : kPieceLeast;
        const float second = begin[bits(m) >> 23 & (kExponents - 1)];
        if (bits(m) - bits(second) < kBeginNear) return -1;
        const uint32_t line = (bits(second) & (kLines - 1)) + (m >= second);
        const float steps = std::fma(m, slope[line & (kLines - 1)], offset[line & (kLines - 1)]);
        const auto units = static_cast<int32_t>(std::lrint(std::fmin(steps, limit[line & (kLines - 1)])));
        const int32_t found = units + 0x8000 + kPieceMargin + off;
        return (found & 0xffff) < 2 * kPieceMargin ? -1 : found >> 16;
    }
};

// Collects the positive thresholds as increasing magnitudes. False unless the first is above 0, and thresholds of
// negative values mirror them.
bool magnitudes(const float* thresholds, const float* numbers, int32_t size, int32_t& zero, std::vector<double>& t) {
    zero = 0;
    while (zero < size && numbers[zero] < 0) ++zero;
    if (zero + 1 >= size || (zero && numbers[zero] != 0)) return false;
    for (int32_t i = 1; i <= zero; ++i)
        if (zero + i >= size || !(std::fabs(thresholds[zero + i] + thresholds[zero + 1 - i]) <= 0x1p-21f * thresholds[zero + i]))
            return false;
    for (int32_t i = zero + 1; i < size; ++i) t.push_back(thresholds[i]);
    for (size_t i = 0; i < t.size(); ++i)
        if (!(t[i] > (i ? t[i - 1] : kPieceLeast) && t[i] <= 1)) return false;
    return true;
}

// Fits lines; each starts at the first threshold that is not on the previous line. Lines in the mask `brief` have a
// single threshold.
bool fit(const std::vector<double>& t, uint32_t brief, Pieces& made, std::vector<float>& begins) {
    const size_t count = t.size();
    for (size_t from = 0, line = 0;; ++line) {  // ranks from `from` on
        if (line == kLines) return false;
        const double start = from ? t[from - 1] : 0;
        double slope = 1, at = start, rank = static_cast<double>(from) + 0.5;  // the line has the value `rank` at `at`
        size_t end = from;                                                      // thresholds before it are on the line
        if (from < count) {
            at = t[from], rank = static_cast<double>(from) + 1;
            slope = from + 1 < count ? 1 / (t[from + 1] - at) : 0.5 / (at - start);
            if (brief >> line & 1 || slope * (at - start) > 1 + 0x1p-10) slope = 0.5 / (at - start);
            const auto on = [&](size_t i) {
                return std::fabs(rank + slope * (t[i] - at) - static_cast<double>(i + 1)) < 0x1p-10;
            };
            while (end < count && on(end) && !(brief >> line & 1 && end > from)) ++end;
            if (end > from + 1) slope = static_cast<double>(end - 1 - from) / (t[end - 1] - at);
        }
        made.slope[line] = static_cast<float>(slope * 65536);
        made.offset[line] = static_cast<float>((rank - slope * at - 0.5) * 65536);
        made.limit[line] = static_cast<float>(static_cast<double>(end) * 65536);
        if (end == count) return true;
        begins.push_back(static_cast<float>(t[end]));
        from = end + 1;
    }
}

// For each exponent, sets where the second line begins, if one does: a little early, with the index of the first line
// in the low bits.
bool begin(const std::vector<float>& begins, Pieces& made) {
    size_t line = 0;
    for (uint32_t e = 127 - 24; e <= 127; ++e) {
        const auto low = static_cast<uint32_t>(line);
        uint32_t second = 0x7f000000 | low;
        if (line < begins.size()) {
            const auto before = [&] { return (bits(begins[line]) - kBeginNear / 2 - low) / kLines * kLines + low; };
            if (before() >> 23 == e) second = before(), ++line;
            if (line < begins.size() && before() >> 23 == e) return false;
        }
        made.begin[e & (kExponents - 1)] = number(second);
    }
    return line == begins.size();
}

// Whether magnitudes around and between thresholds get their rank, or are reported as near a threshold.
bool holds(const std::vector<double>& t, const Pieces& made) {
    for (size_t i = 0; i < t.size(); ++i) {
        const uint32_t own = bits(static_cast<float>(t[i]));
        std::vector<uint32_t> probes;
        for (uint32_t gap = 0; gap < 2 * kBeginNear; ++gap) probes.push_back(own - gap), probes.push_back(own + gap);
        if (i + 1 < t.size())
            for (int k = 1; k < 32; ++k) probes.push_back(bits(static_cast<float>(t[i] + (t[i + 1] - t[i]) * k / 32)));
        for (const uint32_t probe : probes) {
            const float m = number(probe);
            int32_t rank = 0;
            for (const size_t k : {i, i + 1, i + 2}) rank += k < t.size() + 1 && k > 0 && m >= static_cast<float>(t[k - 1]);
            const int32_t below = static_cast<int32_t>(i > 0 ? i - 1 : 0);
            for (const int32_t off : {-5, 0, 5}) {  // errors of products with 1 / scale, and of rounding
                const int32_t found = made.rank(m, off);
                if (found >= 0 && found != below + rank) return false;
            }
        }
    }
    return true;
}

}  // namespace

void find_pieces(const float* thresholds, const float* numbers, int32_t size, uint8_t* tables) {
    Pieces made;
    std::vector<double> t;
    int32_t zero = 0;
    tables[2049] = tables[2050] = 0;
    if (!magnitudes(thresholds, numbers, size, zero, t)) return;
    const auto fits = [&](uint32_t brief) {
        for (float& x : made.begin) x = number(0x7f000000);
        std::vector<float> begins;
        return fit(t, brief, made, begins) && begin(begins, made) && holds(t, made);
    };
    uint32_t brief = 0;
    while (brief < 16 && !fits(brief)) ++brief;
    if (brief == 16) return;
    tables[2049] = zero ? 2 : 1;
    tables[2050] = static_cast<uint8_t>(zero);
    std::memcpy(tables + kPieces, made.begin, sizeof made.begin);
    std::memcpy(tables + kPieces + 128, made.slope, sizeof made.slope);
    std::memcpy(tables + kPieces + 192, made.offset, sizeof made.offset);
    std::memcpy(tables + kPieces + 256, made.limit, sizeof made.limit);
}

}  // namespace hop
