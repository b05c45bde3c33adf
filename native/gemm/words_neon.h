// Decodes codes to bfloat16 with NEON. Included in a namespace (isa.h), after tiles_neon.h, bytes_neon.h and a header
// with the engine's order of 16 words: store_words, store_bytes (for low and high bytes) and decode_one_by_one.

class Words {
public:
    static constexpr bool kPacked = true;

    explicit Words(int format)
        : decoder_(decoder(format)), format_(format),
          bytes_(is_narrow(format) ? 4 : 8, format == HOP_E5M2 ? 2 : 3,
                 [d = decoder_](int code) { return d->high[code] << 8 | d->low[code]; }) {}

    // Like decode_one_by_one, bit for bit, for several vectors of 16 quads; two at a time if Packed.
    template <bool Packed = false>
    void decode(const uint8_t* codes, int vectors, const PerQuads<uint8_t>& zero, const PerQuads<float>& fold,
                uint16_t* even, uint16_t* odd) const {
        for (int i = 0; i < vectors; ++i) {
            const uint8_t* from = codes + (Packed ? i / 2 : i) * 64;
            uint8_t own[64];
            if (Packed)
                for (int j = 0; j < 64; j += 16) {
                    const uint8x16_t x = vld1q_u8(from + j);
                    vst1q_u8(own + j, i % 2 ? vshrq_n_u8(x, 4) : vandq_u8(x, vdupq_n_u8(15)));
                }
            vector(Packed ? own : from, zero.at(i), fold.at(i), even + i * 32, odd + i * 32);
        }
    }

private:
    void vector(const uint8_t* codes, const uint8_t* zero, const float* fold, uint16_t* even, uint16_t* odd) const {
        if (zero && fold) return decode_one_by_one(*decoder_, codes, zero, fold, even, odd);
        if (fold) return folded(codes, fold, even, odd);
        for (int i = 0; i < 4; ++i) {
            const uint8x16_t code = vld1q_u8(codes + 16 * i);
            if (zero) {
                const uint8x16_t quads = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
                const uint8x16_t z = vqtbl1q_u8(vld1q_u8(zero), vaddq_u8(quads, vdupq_n_u8(static_cast<uint8_t>(4 * i))));
                const uint16x8_t a = vsubl_u8(vget_low_u8(code), vget_low_u8(z)), b = vsubl_high_u8(code, z);
                store_words(i, of_integers(vreinterpretq_s16_u16(a)), of_integers(vreinterpretq_s16_u16(b)), even, odd);
            } else if (format_ == HOP_INT8 || format_ == HOP_UINT8) {
                uint16x8_t words[2];
                of_codes(code, words);
                store_words(i, words[0], words[1], even, odd);
            } else {
                uint8x16_t low, high;
                bytes_.of(code, low, high);
                store_bytes(i, low, high, even, odd);
            }
        }
    }

    // Multiplies values by the fold of their quad; results that are not bfloat16 numbers are recomputed one by one.
    void folded(const uint8_t* codes, const float* fold, uint16_t* even, uint16_t* odd) const {
        uint32x4_t rest = vdupq_n_u32(0);
        for (int i = 0; i < 4; ++i) {
            const uint8x16_t code = vld1q_u8(codes + 16 * i);
            const float32x4_t factors = vld1q_f32(fold + 4 * i);
            uint16x8_t words[2];
            if (format_ == HOP_INT8 || format_ == HOP_UINT8) {
                of_codes(code, words);
            } else {
                uint8x16_t low, high;
                bytes_.of(code, low, high);
                words[0] = vreinterpretq_u16_u8(vzip1q_u8(low, high)), words[1] = vreinterpretq_u16_u8(vzip2q_u8(low, high));
            }
            for_lanes<2>([&](auto half) {
                constexpr int at = 2 * half.value;
                const auto number = [](uint32x4_t bits) { return vreinterpretq_f32_u32(bits); };
                const uint32x4_t first = vreinterpretq_u32_f32(
                    vmulq_laneq_f32(number(vshll_n_u16(vget_low_u16(words[half.value]), 16)), factors, at));
                const uint32x4_t second = vreinterpretq_u32_f32(
                    vmulq_laneq_f32(number(vshll_high_n_u16(words[half.value], 16)), factors, at + 1));
                rest = vorrq_u32(rest, vorrq_u32(first, second));
                words[half.value] = vuzp2q_u16(vreinterpretq_u16_u32(first), vreinterpretq_u16_u32(second));
            });
            store_words(i, words[0], words[1], even, odd);
        }
        if (vmaxvq_u16(vreinterpretq_u16_u32(vshlq_n_u32(rest, 16)))) decode_one_by_one(*decoder_, codes, nullptr, fold, even, odd);
    }

    void of_codes(uint8x16_t code, uint16x8_t words[2]) const {
        if (format_ == HOP_INT8) {
            const int8x16_t x = vreinterpretq_s8_u8(code);
            words[0] = of_integers(vmovl_s8(vget_low_s8(x))), words[1] = of_integers(vmovl_high_s8(x));
        } else {
            words[0] = of_integers(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(code))));
            words[1] = of_integers(vreinterpretq_s16_u16(vmovl_high_u8(code)));
        }
    }

    // Converts integers up to 256, which bfloat16 represents exactly.
    static uint16x8_t of_integers(int16x8_t x) {
        const float32x4_t first = vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), second = vcvtq_f32_s32(vmovl_high_s16(x));
        return vuzp2q_u16(vreinterpretq_u16_f32(first), vreinterpretq_u16_f32(second));
    }

    const Decoder* decoder_;
    int format_;
    FloatBytes bytes_;  // unless codes are 8-bit integers
};
