// NEON versions of loops of dequantize_decode.h in which compilers would look up values one by one: few-bit floats, and
// codebooks of 16 values. Included in a namespace (isa.h), after dequantize_decode.h and bytes_neon.h.

struct Numbers {
    float32x4_t v[4];
};

// Few-bit floats, as bfloat16 numbers.
struct FloatNumbers {
    FloatBytes bytes;
    HOP_MEMBER Numbers of(uint8x16_t codes) const {
        uint8x16_t low, high;
        bytes.of(codes, low, high);
        const uint16x8_t first = vreinterpretq_u16_u8(vzip1q_u8(low, high)), second = vreinterpretq_u16_u8(vzip2q_u8(low, high));
        const auto number = [](uint32x4_t bits) { return vreinterpretq_f32_u32(bits); };
        return {{number(vshll_n_u16(vget_low_u16(first), 16)), number(vshll_high_n_u16(first, 16)),
                 number(vshll_n_u16(vget_low_u16(second), 16)), number(vshll_high_n_u16(second, 16))}};
    }
};

// Codebooks of 16 values, by their four bytes.
struct BookNumbers {
    uint8x16_t bytes[4];
    explicit BookNumbers(const float* numbers) {
        const uint8x16x4_t all = vld4q_u8(reinterpret_cast<const uint8_t*>(numbers));
        for (int i = 0; i < 4; ++i) bytes[i] = all.val[i];
    }
    HOP_MEMBER Numbers of(uint8x16_t codes) const {
        uint8x16_t b[4];
        for (int i = 0; i < 4; ++i) b[i] = vqtbl1q_u8(bytes[i], codes);
        const uint8x16_t low[2] = {vzip1q_u8(b[0], b[1]), vzip2q_u8(b[0], b[1])};
        const uint8x16_t high[2] = {vzip1q_u8(b[2], b[3]), vzip2q_u8(b[2], b[3])};
        Numbers n;
        for (int i = 0; i < 2; ++i) {
            const uint16x8_t l = vreinterpretq_u16_u8(low[i]), h = vreinterpretq_u16_u8(high[i]);
            n.v[2 * i] = vreinterpretq_f32_u16(vzip1q_u16(l, h)), n.v[2 * i + 1] = vreinterpretq_f32_u16(vzip2q_u16(l, h));
        }
        return n;
    }
};

// Loads 16 codes from element i on.
template <int bits>
HOP_INLINE uint8x16_t load_codes(const uint8_t* codes, int64_t i) {
    if (bits == 8) return vld1q_u8(codes + i);
    const uint8x8_t pairs = vld1_u8(codes + i / 2);
    const uint8x8_t low = vand_u8(pairs, vdup_n_u8(15)), high = vshr_n_u8(pairs, 4);
    return vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high));
}

template <class T, int bits, class Find>
static void decode_blocks(const uint8_t* codes, int64_t n, int64_t size, const float* steps, const Find find,
                          typename T::Word* __restrict__ out) {
    for (int64_t at = 0; at < n; at += size, ++steps) {
        const float32x4_t step = vdupq_n_f32(*steps);
        for (int64_t i = at; i < at + size; i += 16) {
            const Numbers numbers = find.of(load_codes<bits>(codes, i));
            float x[16];
            for (int j = 0; j < 4; ++j) vst1q_f32(x + 4 * j, vmulq_f32(numbers.v[j], step));
            for (int j = 0; j < 16; ++j) out[i + j] = T::narrow(x[j]);
        }
    }
}

// Decodes whole blocks of a multiple of 16 values; returns false for other blocks.
template <class T>
static bool decode_quickly(const DequantizeCall& c, const uint8_t*, const uint8_t* codes, int64_t n, const float* steps,
                           typename T::Word* out) {
    const hop_quantizer& q = c.q;
    const int64_t size = least(c.blocks.tile_cols, n);
    if (size % 16 || n % size) return false;
    if (q.format == HOP_CODEBOOK && q.bits == 4 && q.size == 16)
        return decode_blocks<T, 4>(codes, n, size, steps, BookNumbers(q.numbers), out), true;
    if (q.format != HOP_FLOAT) return false;
    const FloatFormat f = float_format(q);
    const FloatNumbers numbers{FloatBytes(q.bits, q.mantissa_bits, [&](uint32_t code) { return bits_of(decode_float(code, f)) >> 16; })};
    if (q.bits == 4) return decode_blocks<T, 4>(codes, n, size, steps, numbers, out), true;
    if (q.bits != 8 || (q.mantissa_bits != 2 && q.mantissa_bits != 3)) return false;
    return decode_blocks<T, 8>(codes, n, size, steps, numbers, out), true;
}
