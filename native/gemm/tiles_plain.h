// Replaces tiles_avx512.h for other instruction sets. Included in a namespace (isa.h).

// Widens 64 4-bit codes to bytes.
inline void widen(const uint8_t* narrow, uint8_t* codes) {
    for (int i = 0; i < 32; ++i) {
        codes[2 * i] = narrow[i] & 15;
        codes[2 * i + 1] = narrow[i] >> 4;
    }
}

// Widens a tile of 4-bit codes to bytes. Bit `sign` (8, or 0 for none) is the sign.
inline void widen_tile(const uint8_t* narrow, uint8_t sign, uint8_t* tile) {
    for (int pair = 0; pair < kQuads / 2; ++pair)
        for (int i = 0; i < 64; ++i) {
            tile[pair * 128 + i] = static_cast<uint8_t>(((narrow[pair * 64 + i] & 15) ^ sign) - sign);
            tile[pair * 128 + 64 + i] = static_cast<uint8_t>((narrow[pair * 64 + i] >> 4 ^ sign) - sign);
        }
}

// Makes tiles from columns: src[k * stride + row].
inline void tile_from_columns(const uint8_t* src, int64_t stride, uint8_t* tile) {
    for (int k = 0; k < kSlice; ++k)
        for (int row = 0; row < kRows; ++row) tile[(k / 4 * kRows + row) * 4 + k % 4] = src[k * stride + row];
}

// Makes four tiles from 64 columns.
inline void tiles_from_columns(const uint8_t* src, int64_t stride, uint8_t* const tiles[4]) {
    for (int i = 0; i < 4; ++i) tile_from_columns(src + i * kRows, stride, tiles[i]);
}

// Converts 64 codes to int8: flips the sign bit of uint8, extends INT4.
inline void to_int8(int format, const uint8_t* codes, uint8_t* out) {
    if (format == HOP_UINT8)
        for (int i = 0; i < 64; ++i) out[i] = codes[i] ^ 0x80;
    else if (format == HOP_INT4)
        for (int i = 0; i < 64; ++i) out[i] = static_cast<uint8_t>((codes[i] ^ 8) - 8);
    else
        std::memcpy(out, codes, 64);
}

inline int32_t sum_of(const int8_t* codes, int count) {
    int32_t sum = 0;
    for (int i = 0; i < count; ++i) sum += codes[i];
    return sum;
}

inline void split_words(const uint16_t* words, uint16_t* even, uint16_t* odd) {
    for (int quad = 0; quad < 16; ++quad) {
        even[quad * 2] = words[quad * 4], even[quad * 2 + 1] = words[quad * 4 + 2];
        odd[quad * 2] = words[quad * 4 + 1], odd[quad * 2 + 1] = words[quad * 4 + 3];
    }
}

inline void fence() {}
inline void store_lines(void* out, const void* data, size_t bytes) { std::memcpy(out, data, bytes); }
