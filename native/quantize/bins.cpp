// The bins of a codebook (quantize.h).
#include <cmath>
#include <cstring>

#include "quantize/quantize.h"

namespace hop {
namespace {

constexpr int32_t kCode = 0x10000, kEnd = 0x8000, kEdge = 2 * kBinMargin;

// The thresholds of one sign: how many each bin has, and the position of the last one in it. The bins before the first
// and after the last are empty.
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
    // Finds the position in a bin near which values must be divided: its threshold, or one in an adjacent bin so close
    // that a product with 1 / scale may fall into this bin while the quotient does not. If there is none, the position
    // is the middle of the next bin. Returns false for more than one.
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
    // Codes count the thresholds that a value reaches; for negative values those are the thresholds of larger
    // magnitude.
    int32_t smaller = below.size, larger = below.size;
    for (int64_t bin = 1; bin <= kBinsOfSign; ++bin) {
        int32_t up, down;
        if (!above.find(bin, up) || !below.find(bin, down)) return;
        larger -= below.count[bin];
        down = kEnd - 1 - down;  // values increase as magnitudes decrease
        // The code of the bin's lowest value. A threshold at -1 (in the previous bin) is already counted: subtract it.
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
