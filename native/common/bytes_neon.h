// Looks up few-bit floats as bfloat16 numbers, low and high bytes separately. Included in a namespace (isa.h).

struct FloatBytes {
    int bits = 0, shift = 0;       // bits of a code; left shift that moves an 8-bit magnitude to its position in bfloat16
    uint8x16_t low[2], high[2];    // for codes of 4 bits, or for magnitudes 0 to 15 and 112 to 127
    uint8x16_t base;               // offset for the high byte of a shifted magnitude

    // words(code) returns the upper 16 bits of the float that a code represents.
    template <class Words>
    FloatBytes(int count, int mantissa, const Words words) : bits(count), shift(7 - mantissa), base(vdupq_n_u8(0)) {
        for (int part = 0; part < (bits == 4 ? 1 : 2); ++part) {
            uint8_t bytes[2][16];
            for (int i = 0; i < 16; ++i) {
                const auto word = static_cast<uint16_t>(words(part * 112 + i));
                bytes[0][i] = static_cast<uint8_t>(word), bytes[1][i] = static_cast<uint8_t>(word >> 8);
            }
            low[part] = vld1q_u8(bytes[0]), high[part] = vld1q_u8(bytes[1]);
        }
        if (bits == 8) base = vdupq_n_u8(static_cast<uint8_t>((words(16) - (16 << shift)) >> 8));
    }

    // Magnitudes 16 to 111 are shifted and offset; lower and higher ones are looked up: an index outside a table leaves
    // the destination unchanged.
    void of(uint8x16_t code, uint8x16_t& l, uint8x16_t& h) const {
        if (bits == 4) {
            l = vqtbl1q_u8(low[0], code), h = vqtbl1q_u8(high[0], code);
            return;
        }
        const uint8x16_t magnitude = vandq_u8(code, vdupq_n_u8(127)), above = vsubq_u8(magnitude, vdupq_n_u8(112));
        l = shift == 5 ? vshlq_n_u8(code, 5) : vshlq_n_u8(code, 4);
        h = vaddq_u8(shift == 5 ? vshrq_n_u8(magnitude, 3) : vshrq_n_u8(magnitude, 4), base);
        l = vqtbx1q_u8(vqtbx1q_u8(l, low[0], magnitude), low[1], above);
        h = vqtbx1q_u8(vqtbx1q_u8(h, high[0], magnitude), high[1], above);
        h = vbslq_u8(vdupq_n_u8(128), code, h);
    }
};
