// The format of lhs for engines without bfloat16 products. Included in a namespace (isa.h).

// Converts a tile of bfloat16 to float32: [16 rows][4][16 quads], with k 0, 2, 1 and 3 of each quad.
inline void lhs_floats(const uint8_t* tile, uint8_t* out) {
    for (int row = 0; row < kRows; ++row)
        for (int e = 0; e < 2; ++e, out += 2 * kQuads * sizeof(float)) {
            uint16_t words[2 * kQuads];
            std::memcpy(words, tile + e * kTile + row * kSlice, sizeof(words));
            uint32_t bits[2 * kQuads];
            for (int quad = 0; quad < kQuads; ++quad) {
                bits[quad] = static_cast<uint32_t>(words[2 * quad]) << 16;
                bits[kQuads + quad] = static_cast<uint32_t>(words[2 * quad + 1]) << 16;
            }
            std::memcpy(out, bits, sizeof(bits));
        }
}
