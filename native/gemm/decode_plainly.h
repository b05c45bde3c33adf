// Included in a namespace (isa.h).

// The bfloat16 numbers of 16 quads: of k 0 and 2 in `even`, of k 1 and 3 in `odd`. Of each quad, `zero` is taken from the
// code first, and `fold` multiplies the number. What is seldom called is not to take registers from what is.
__attribute__((noinline)) inline void decode_plainly(
    const Decoder& d, const uint8_t* codes, const uint8_t* zero, const float* fold, uint16_t* even, uint16_t* odd) {
    uint16_t* const out[2] = {even, odd};
    for (int quad = 0; quad < 16; ++quad)
        for (int i = 0; i < 4; ++i) {
            const int code = codes[quad * 4 + i];
            const uint16_t word = static_cast<uint16_t>(d.high[code] << 8 | d.low[code]);
            const float x = (zero ? static_cast<float>(code - zero[quad]) : from_bfloat16(word)) * (fold ? fold[quad] : 1.f);
            out[i % 2][quad * 2 + i / 2] = to_bfloat16(x);
        }
}
