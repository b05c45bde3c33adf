// Included in a namespace (isa.h).

// Decodes 16 quads to bfloat16: k 0 and 2 to `even`, k 1 and 3 to `odd`. In each quad, `zero` is subtracted from the
// codes first, and the values are multiplied by `fold`. Not inlined: it is rarely called, and would take registers from
// hot code.
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
