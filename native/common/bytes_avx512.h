// Looks up up to 256 floats by permuting the tables of hop_codebook_tables. Included in a namespace (isa.h).

struct ByteTables {
    __m512i table[4][4];  // [byte of the float][64 entries at a time]

    explicit ByteTables(const uint8_t* bytes) {
        for (int byte = 0; byte < 4; ++byte)
            for (int part = 0; part < 4; ++part) table[byte][part] = _mm512_loadu_si512(bytes + 256 * byte + 64 * part);
    }

    // Looks up four vectors of floats. `places` has groups of 16 indices: each group has four indices for each vector,
    // in order of the vectors.
    HOP_MEMBER void of(__m512i places, __m512 v[4]) const {
        const __mmask64 above = _mm512_movepi8_mask(places);
        __m512i b[4];
        for (int j = 0; j < 4; ++j) {
            const __m512i low = _mm512_permutex2var_epi8(table[j][0], places, table[j][1]);
            b[j] = _mm512_mask_mov_epi8(low, above, _mm512_permutex2var_epi8(table[j][2], places, table[j][3]));
        }
        const __m512i low = _mm512_unpacklo_epi8(b[0], b[1]), high = _mm512_unpacklo_epi8(b[2], b[3]);
        const __m512i low2 = _mm512_unpackhi_epi8(b[0], b[1]), high2 = _mm512_unpackhi_epi8(b[2], b[3]);
        v[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low, high));
        v[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low, high));
        v[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low2, high2));
        v[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low2, high2));
    }

    // The same for four vectors of 32-bit indices.
    HOP_MEMBER void of_lanes(const __m512i n[4], __m512 v[4]) const {
        const __m512i a = _mm512_or_si512(n[0], _mm512_slli_epi32(n[1], 8));
        const __m512i b = _mm512_or_si512(_mm512_slli_epi32(n[2], 16), _mm512_slli_epi32(n[3], 24));
        const __m512i turn = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
        of(_mm512_shuffle_epi8(_mm512_or_si512(a, b), turn), v);
    }
};
