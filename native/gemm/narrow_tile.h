// Included in a namespace (isa.h).

// Packs a tile of 4-bit codes, one in each byte: the codes of a quad of k and of the next share bytes.
inline void narrow_tile(const uint8_t* codes, uint8_t* tile) {
    for (int i = 0; i < kTile / 2; ++i) {
        const int at = i / 64 * 128 + i % 64;
        tile[i] = static_cast<uint8_t>(codes[at] | codes[at + 64] << 4);
    }
}
