// The order of words for engines on bfloat16: unchanged, with quads 0 to 7 of a vector in `even`, and 8 to 15 in `odd`.
// With NEON. Included in a namespace (isa.h), after decode_plainly.h.

// Stores words 16 i to 16 i + 15 of a vector.
inline void store_words(int i, uint16x8_t first, uint16x8_t second, uint16_t* even, uint16_t* odd) {
    uint16_t* out = (i < 2 ? even : odd) + i % 2 * 16;
    vst1q_u16(out, first);
    vst1q_u16(out + 8, second);
}

inline void store_bytes(int i, uint8x16_t low, uint8x16_t high, uint16_t* even, uint16_t* odd) {
    store_words(i, vreinterpretq_u16_u8(vzip1q_u8(low, high)), vreinterpretq_u16_u8(vzip2q_u8(low, high)), even, odd);
}

inline void decode_one_by_one(const Decoder& d, const uint8_t* codes, const uint8_t* zero, const float* fold,
                              uint16_t* even, uint16_t* odd) {
    uint16_t own[2][32];
    decode_plainly(d, codes, zero, fold, own[0], own[1]);
    for (int i = 0; i < 64; ++i) (i < 32 ? even : odd)[i % 32] = own[i % 2][i / 4 * 2 + i % 4 / 2];
}

inline void split_words(const uint16_t* words, uint16_t* even, uint16_t* odd) {
    std::memcpy(even, words, 64);
    std::memcpy(odd, words + 32, 64);
}
