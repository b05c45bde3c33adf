// Rows of words that become columns, of any instruction set. Included in a namespace (isa.h).

// A tile of rows of 64 bytes: the quads of each row side by side -> those of each quad.
inline void tile_from_rows(const uint8_t* src, int64_t stride, uint8_t* tile) {
    for (int row = 0; row < kRows; ++row)
        for (int quad = 0; quad < kQuads; ++quad)
            std::memcpy(tile + (quad * kRows + row) * 4, src + row * stride + quad * 4, 4);
}

// 16 rows of 16 numbers times a factor, turned.
inline void numbers_from_rows(const uint8_t* src, int64_t stride, float factor, float* out, int64_t out_stride) {
    for (int row = 0; row < kRows; ++row) {
        float own[kRows];
        std::memcpy(own, src + row * stride, sizeof(own));
        for (int i = 0; i < kRows; ++i) out[i * out_stride + row] = own[i] * factor;
    }
}
