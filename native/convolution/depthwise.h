// Depthwise convolutions. Included in a namespace (isa.h).
//
// Four taps of 32 channels are multiplied at a time. The weight of a panel is [taps / 4][32 channels][4 taps], padded
// with zeros. The channels are in the order in which bytes of four lines are interleaved: 0 to 3, 16 to 19, 4 to 7, 20
// to 23, ...

constexpr int kTaps = 4, kTapBytes = kBlock * kTaps;

inline int place_of_channel(int channel) { return channel % 16 / 4 * 8 + channel / 16 * 4 + channel % 4; }

inline void depthwise_weight(const Convolution& c, int64_t panel, int8_t* out) {
    const int64_t first = panel * kBlock, count = c.outputs - first < kBlock ? c.outputs - first : kBlock;
    if (c.job.p.rhs.layout == HOP_TILED && c.job.p.rhs.format == HOP_INT8) {  // its quads contain four taps
        constexpr int kFour = 4 * kTaps;                                       // bytes of four channels
        const auto* tiles = static_cast<const int8_t*>(c.job.rhs.codes) + panel * ceil_div(c.taps, kSlice) * 2 * kTile;
        for (int64_t step = 0; step < c.slices; ++step, out += kTapBytes) {
            const int8_t* quad = tiles + step / kQuads * 2 * kTile + step % kQuads * kRows * kTaps;
            for (int channel = 0; channel < kBlock; channel += 4)
                std::memcpy(out + place_of_channel(channel) * kTaps,
                            quad + channel / kRows * kTile + channel % kRows / 4 * kFour, kFour);
        }
        return;
    }
    std::memset(out, 0, static_cast<size_t>(c.slices * kTapBytes));
    for (int64_t tap = 0; tap < c.taps; ++tap)
        for (int64_t i = 0; i < count; ++i)
            weight_codes(c, first + i, tap, 0, 1,
                         out + tap / kTaps * kTapBytes + place_of_channel(static_cast<int>(i)) * kTaps + tap % kTaps);
}

// Computes the sums of some pixels, whose first taps are at the addresses `from`, in 32 channels. `turned`: the codes
// are signed and are converted to unsigned. Defined in depthwise_avx512.h, depthwise_avx2.h or
// depthwise_plain.h.
inline void depthwise_rows(const int64_t* from, int64_t channel, int rows, const int64_t* offsets, int64_t steps,
                           bool turned, const int8_t* weight, int32_t* sums);

inline void add_depthwise(const int8_t* weight, int64_t steps, int32_t* sums) {
    uint8_t ones[kBlock];
    std::memset(ones, 1, sizeof(ones));
    const int64_t from = reinterpret_cast<int64_t>(ones), nowhere[kTaps] = {};
    for (int64_t step = 0; step < steps; ++step, weight += kTapBytes) {
        int32_t found[kBlock];
        depthwise_rows(&from, 0, 1, nowhere, 1, false, weight, found);
        for (int channel = 0; channel < kBlock; ++channel) sums[channel] += found[channel];
    }
}
