// The bins of a codebook (quantize.h).
#include <cmath>
#include <cstring>

#include "quantize/quantize.h"

namespace hop {
namespace {

constexpr int32_t kCode = 0x10000, kEnd = 0x8000, kEdge = 2 * kBinMargin;

// The thresholds of a sign: how many each bin has, and where in it the last is; none before the first and after the last bin.
struct Thresholds {
    int32_t count[kBinsOfSign + 2] = {}, at[kBinsOfSign + 2], size = 0;

    Thresholds(const float* t, int32_t codes, bool negative) {
        for (int32_t i = 1; i < codes; ++i) {
            if (std::signbit(t[i]) != negative) continue;
            uint32_t bits;
            std::memcpy(&bits, &t[i], 4);
            const uint32_t bin = (bits & 0x7fffffff) / kCode - kFirstBin + 1;
            at[bin] = static_cast<int32_t>(bits % kCode / 2);
            ++count[bin], ++size;
        }
    }
    // Where numbers of a bin are to count as near to a threshold: that of the bin, or one of a bin beside it, where a quotient
    // may lie whose product with 1 / scale lies here. The middle of the next bin where there is none; false for more than one.
    bool find(int64_t bin, int32_t& place) const {
        const bool before = count[bin - 1] && at[bin - 1] >= kEnd - kEdge, after = count[bin + 1] && at[bin + 1] < kEdge;
        place = count[bin] ? at[bin] : before ? -1 : after ? kEnd : kEnd + kEnd / 2;
        return count[bin] + before + after <= 1;
    }
};

}  // namespace

void find_bins(const float* thresholds, int32_t size, uint8_t* tables) {
    tables[kHasBins] = 0;
    for (int32_t i = 1; i < size; ++i)
        if (!(std::fabs(thresholds[i]) > 1.0001f * kBinLeast && std::fabs(thresholds[i]) < 1.9999f)) return;
    const Thresholds above(thresholds, size, false), below(thresholds, size, true);
    // Codes count the thresholds that a number reaches: of a negative one those of larger magnitude.
    int32_t smaller = below.size, larger = below.size;
    for (int64_t bin = 1; bin <= kBinsOfSign; ++bin) {
        int32_t up, down;
        if (!above.find(bin, up) || !below.find(bin, down)) return;
        larger -= below.count[bin];
        down = kEnd - 1 - down;  // numbers count up with falling magnitudes
        // The code is that of the bin's lowest number: before a threshold at -1 of one less.
        const int32_t of_up = (smaller + (up < 0 ? -1 : 0)) * kCode + kCode - up;
        const int32_t of_down = (larger + (down < 0 ? -1 : 0)) * kCode + kCode - down;
        smaller += above.count[bin];
        const int32_t entries[2] = {of_up + int32_t(kBinMargin), of_down + int32_t(kBinMargin)};
        std::memcpy(tables + kBins + 4 * (bin - 1), &entries[0], 4);
        std::memcpy(tables + kBins + 4 * (bin - 1 + kBinsOfSign), &entries[1], 4);
    }
    tables[kHasBins] = 1;
}

}  // namespace hop
