// Transposes rows of words to columns, and computes their sums and scales, for any instruction set. Included in a
// namespace (isa.h).

// Transposes a tile of rows of 64 bytes: from all quads of each row to all rows of each quad.
inline void tile_from_rows(const uint8_t* src, int64_t stride, uint8_t* tile) {
    for (int row = 0; row < kRows; ++row)
        for (int quad = 0; quad < kQuads; ++quad)
            std::memcpy(tile + (quad * kRows + row) * 4, src + row * stride + quad * 4, 4);
}

// Transposes 16 rows of 16 floats, multiplied by a factor.
inline void numbers_from_rows(const uint8_t* src, int64_t stride, float factor, float* out, int64_t out_stride) {
    for (int row = 0; row < kRows; ++row) {
        float own[kRows];
        std::memcpy(own, src + row * stride, sizeof(own));
        for (int i = 0; i < kRows; ++i) out[i * out_stride + row] = own[i] * factor;
    }
}

// Adds the codes of some quads, a multiple of 4, of 16 rows to each row's sum; for `steps` tiles at distance `step`.
inline void add_quads(const uint8_t* tile, int quads, int64_t steps, int64_t step, int32_t* sums) {
    for (; steps > 0; --steps, tile += step) {
        int16_t halves[2 * kRows] = {};  // sums of two codes each
        for (int quad = 0; quad < quads; ++quad)
            for (int i = 0; i < 2 * kRows; ++i) {
                uint16_t codes;
                std::memcpy(&codes, tile + quad * 64 + 2 * i, 2);
                const int first = static_cast<int16_t>(codes) >> 8;
                const int second = static_cast<int16_t>(static_cast<uint16_t>(codes << 8)) >> 8;
                halves[i] = static_cast<int16_t>(halves[i] + first + second);
            }
        for (int i = 0; i < kRows; ++i) sums[i] += halves[2 * i] + halves[2 * i + 1];
    }
}

// Decodes the scales in byte `at` of 16 quads.
inline void scales_of_quads(int format, const uint8_t* quads, int at, float* scales) {
    const float* table = scale_table(format);
    for (int i = 0; i < kRows; ++i) scales[i] = table[quads[4 * i + at]];
}
