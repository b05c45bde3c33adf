// The order of words for engines on float32: k 0 and 2 of each quad in `even`, k 1 and 3 in `odd`. With NEON. Included
// in a namespace (isa.h), after decode_plainly.h.

// Stores words 16 i to 16 i + 15 of a vector.
inline void store_words(int i, uint16x8_t first, uint16x8_t second, uint16_t* even, uint16_t* odd) {
    vst1q_u16(even + 8 * i, vuzp1q_u16(first, second));
    vst1q_u16(odd + 8 * i, vuzp2q_u16(first, second));
}

inline void store_bytes(int i, uint8x16_t low, uint8x16_t high, uint16_t* even, uint16_t* odd) {
    vst1q_u16(even + 8 * i, vreinterpretq_u16_u8(vtrn1q_u8(low, high)));
    vst1q_u16(odd + 8 * i, vreinterpretq_u16_u8(vtrn2q_u8(low, high)));
}

inline void decode_one_by_one(const Decoder& d, const uint8_t* codes, const uint8_t* zero, const float* fold,
                              uint16_t* even, uint16_t* odd) {
    decode_plainly(d, codes, zero, fold, even, odd);
}

inline void split_words(const uint16_t* words, uint16_t* even, uint16_t* odd) {
    for (int i = 0; i < 4; ++i) store_words(i, vld1q_u16(words + 16 * i), vld1q_u16(words + 16 * i + 8), even, odd);
}
