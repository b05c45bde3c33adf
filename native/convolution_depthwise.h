// Convolutions of each channel by itself. Included in a namespace (isa.h).
//
// Four taps of 32 channels are multiplied at once. The weight of a panel is [taps / 4][32 channels][4 taps], filled up
// with zeros, the channels in the order in which bytes of four lines are interleaved: 0 to 3, 16 to 19, 4 to 7, 20 to
// 23, ...

constexpr int kTaps = 4, kTapBytes = kBlock * kTaps;

inline int place_of_channel(int channel) { return channel % 16 / 4 * 8 + channel / 16 * 4 + channel % 4; }

inline void depthwise_weight(const Convolution& c, int64_t panel, int8_t* out) {
    const int64_t first = panel * kBlock, count = c.outputs - first < kBlock ? c.outputs - first : kBlock;
    std::memset(out, 0, static_cast<size_t>(c.slices * kTapBytes));
    for (int64_t tap = 0; tap < c.taps; ++tap)
        for (int64_t i = 0; i < count; ++i)
            weight_codes(c, first + i, tap, 0, 1,
                         out + tap / kTaps * kTapBytes + place_of_channel(static_cast<int>(i)) * kTaps + tap % kTaps);
}

inline void add_depthwise(const int8_t* weight, int64_t steps, int32_t* sums) {
    for (int64_t step = 0; step < steps; ++step, weight += kTapBytes)
        for (int channel = 0; channel < kBlock; ++channel)
            for (int tap = 0; tap < kTaps; ++tap) sums[channel] += weight[place_of_channel(channel) * kTaps + tap];
}
