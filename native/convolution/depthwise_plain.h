// Replaces depthwise_avx512.h for other instruction sets. Included in a namespace (isa.h).

inline void depthwise_rows(const int64_t* from, int64_t first, int rows, const int64_t* offsets, int64_t steps,
                           bool turned, const int8_t* weight, int32_t* sums) {
    const uint8_t flip = turned ? 0x80 : 0;
    for (int row = 0; row < rows; ++row, sums += kBlock) {
        const uint8_t* x = reinterpret_cast<const uint8_t*>(from[row]) + first;
        int32_t found[kBlock] = {};
        for (int64_t step = 0; step < steps; ++step)
            for (int tap = 0; tap < kTaps; ++tap) {
                const uint8_t* in = x + offsets[step * kTaps + tap];
                for (int channel = 0; channel < kBlock; ++channel)
                    found[channel] += (in[channel] ^ flip) *
                                      weight[step * kTapBytes + place_of_channel(channel) * kTaps + tap];
            }
        std::memcpy(sums, found, sizeof(found));
    }
}
