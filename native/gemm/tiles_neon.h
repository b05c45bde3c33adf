// Tiles with NEON. Included in a namespace (isa.h); tiles_plain.h describes the functions.

// Calls body(i) for i = 0..N-1, each a constant: lane numbers are part of the instructions.
template <int N, int I = 0, class Body>
HOP_INLINED inline void for_lanes(const Body& body) {
    if constexpr (I < N) {
        body(std::integral_constant<int, I>());
        for_lanes<N, I + 1>(body);
    }
}

inline void widen(const uint8_t* narrow, uint8_t* codes) {
    for (int i = 0; i < 32; i += 16) {
        const uint8x16_t x = vld1q_u8(narrow + i);
        vst2q_u8(codes + 2 * i, (uint8x16x2_t{{vandq_u8(x, vdupq_n_u8(15)), vshrq_n_u8(x, 4)}}));
    }
}

inline void widen_tile(const uint8_t* narrow, uint8_t sign, uint8_t* tile) {
    const uint8x16_t nibble = vdupq_n_u8(15), signs = vdupq_n_u8(sign);
    for (int pair = 0; pair < kQuads / 2; ++pair, narrow += 64, tile += 128)
        for (int i = 0; i < 64; i += 16) {
            const uint8x16_t x = vld1q_u8(narrow + i);
            vst1q_u8(tile + i, vsubq_u8(veorq_u8(vandq_u8(x, nibble), signs), signs));
            vst1q_u8(tile + 64 + i, vsubq_u8(veorq_u8(vshrq_n_u8(x, 4), signs), signs));
        }
}

// Four quads of four rows at a time.
inline void tile_from_rows(const uint8_t* src, int64_t stride, uint8_t* tile) {
    for (int row = 0; row < kRows; row += 4)
        for (int quad = 0; quad < kQuads; quad += 4) {
            uint32x4_t x[4];
            for (int i = 0; i < 4; ++i) x[i] = vreinterpretq_u32_u8(vld1q_u8(src + (row + i) * stride + quad * 4));
            const uint64x2_t a = vreinterpretq_u64_u32(vtrn1q_u32(x[0], x[1])), b = vreinterpretq_u64_u32(vtrn2q_u32(x[0], x[1]));
            const uint64x2_t c = vreinterpretq_u64_u32(vtrn1q_u32(x[2], x[3])), d = vreinterpretq_u64_u32(vtrn2q_u32(x[2], x[3]));
            const uint64x2_t y[4] = {vzip1q_u64(a, c), vzip1q_u64(b, d), vzip2q_u64(a, c), vzip2q_u64(b, d)};
            for (int i = 0; i < 4; ++i) vst1q_u8(tile + ((quad + i) * kRows + row) * 4, vreinterpretq_u8_u64(y[i]));
        }
}

inline void numbers_from_rows(const uint8_t* src, int64_t stride, float factor, float* out, int64_t out_stride) {
    alignas(16) uint8_t turned[kTile];
    tile_from_rows(src, stride, turned);
    for (int i = 0; i < kRows; ++i)
        for (int row = 0; row < kRows; row += 4) {
            const float32x4_t x = vreinterpretq_f32_u8(vld1q_u8(turned + (i * kRows + row) * 4));
            vst1q_f32(out + i * out_stride + row, vmulq_n_f32(x, factor));
        }
}

inline void tile_from_columns(const uint8_t* src, int64_t stride, uint8_t* tile) {
    for (int quad = 0; quad < kQuads; ++quad, src += 4 * stride)
        vst4q_u8(tile + quad * 64, (uint8x16x4_t{{vld1q_u8(src), vld1q_u8(src + stride), vld1q_u8(src + 2 * stride),
                                                  vld1q_u8(src + 3 * stride)}}));
}

// Processes a quad of each tile in turn, so that each cache line is read once.
inline void tiles_from_columns(const uint8_t* src, int64_t stride, uint8_t* const tiles[4]) {
    for (int quad = 0; quad < kQuads; ++quad, src += 4 * stride)
        for (int i = 0; i < 4; ++i) {
            const uint8_t* from = src + i * kRows;
            vst4q_u8(tiles[i] + quad * 64, (uint8x16x4_t{{vld1q_u8(from), vld1q_u8(from + stride), vld1q_u8(from + 2 * stride),
                                                          vld1q_u8(from + 3 * stride)}}));
        }
}

inline void to_int8(int format, const uint8_t* codes, uint8_t* out) {
    const uint8x16_t turn = vdupq_n_u8(format == HOP_UINT8 ? 0x80 : format == HOP_INT4 ? 8 : 0);
    const uint8x16_t less = vdupq_n_u8(format == HOP_INT4 ? 8 : 0);
    for (int i = 0; i < 64; i += 16) vst1q_u8(out + i, vsubq_u8(veorq_u8(vld1q_u8(codes + i), turn), less));
}

inline void add_quads(const uint8_t* tile, int quads, int64_t steps, int64_t step, int32_t* sums) {
    int32x4_t sum[4];
    for (int i = 0; i < 4; ++i) sum[i] = vld1q_s32(sums + 4 * i);
    for (; steps > 0; --steps, tile += step) {
        int16x8_t pairs[4][2] = {};  // two codes each: sums over 16 quads need 8 more bits
        for (int quad = 0; quad < quads; ++quad)
            for (int i = 0; i < 4; ++i) {
                const int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(tile + quad * 64 + 16 * i));
                pairs[i][quad % 2] = vpadalq_s8(pairs[i][quad % 2], x);
            }
        for (int i = 0; i < 4; ++i) sum[i] = vpadalq_s16(sum[i], vaddq_s16(pairs[i][0], pairs[i][1]));
    }
    for (int i = 0; i < 4; ++i) vst1q_s32(sums + 4 * i, sum[i]);
}

inline int32_t sum_of(const int8_t* codes, int count) {
    int32_t sum = 0;
    for (int i = 0; i < count; ++i) sum += codes[i];
    return sum;
}

inline void scales_of_quads(int format, const uint8_t* quads, int at, float* scales) {
    const float* table = scale_table(format);
    for (int i = 0; i < kRows; ++i) scales[i] = table[quads[4 * i + at]];
}

inline void fence() {}
inline void store_lines(void* out, const void* data, size_t bytes) { std::memcpy(out, data, bytes); }
