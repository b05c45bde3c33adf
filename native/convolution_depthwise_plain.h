// What an instruction set without convolution_depthwise_avx512.h takes in its place. Included in a namespace (isa.h).

inline void depthwise_row(const uint8_t* x, const int64_t* offsets, int64_t steps, uint8_t sign, const int8_t* weight,
                          int32_t* sums) {
    int32_t found[kBlock] = {};
    for (int64_t step = 0; step < steps; ++step, weight += kTapBytes)
        for (int tap = 0; tap < kTaps; ++tap) {
            const uint8_t* in = x + offsets[step * kTaps + tap];
            for (int channel = 0; channel < kBlock; ++channel)
                found[channel] += (in[channel] ^ sign) * weight[place_of_channel(channel) * kTaps + tap];
        }
    std::memcpy(sums, found, sizeof(found));
}
