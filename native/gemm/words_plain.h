// Decodes codes to bfloat16 with a table. Included in a namespace (isa.h).

class Words {
public:
    static constexpr bool kPacked = false;

    explicit Words(int format) : decoder_(decoder(format)) {
        const Decoder& d = *decoder_;
        for (int code = 0; code < 256; ++code) words_[code] = static_cast<uint16_t>(d.high[code] << 8 | d.low[code]);
    }

    // Like decode_plainly, for several vectors of 16 quads.
    void decode(const uint8_t* codes, int vectors, const PerQuads<uint8_t>& zero, const PerQuads<float>& fold,
                uint16_t* even, uint16_t* odd) const {
        for (int i = 0; i < vectors; ++i) decode(codes + i * 64, zero.at(i), fold.at(i), even + i * 32, odd + i * 32);
    }

    void decode(const uint8_t* codes, const uint8_t* zero, const float* fold, uint16_t* even, uint16_t* odd) const {
        if (zero && fold) return decode_plainly(*decoder_, codes, zero, fold, even, odd);
        if (zero) {
            for (int i = 0; i < 32; ++i) {
                even[i] = to_bfloat16(static_cast<float>(codes[2 * i] - zero[i / 2]));
                odd[i] = to_bfloat16(static_cast<float>(codes[2 * i + 1] - zero[i / 2]));
            }
            return;
        }
        for (int i = 0; i < 32; ++i) even[i] = words_[codes[2 * i]], odd[i] = words_[codes[2 * i + 1]];
        if (!fold) return;
        for (int i = 0; i < 32; ++i) even[i] = to_bfloat16(from_bfloat16(even[i]) * fold[i / 2]);
        for (int i = 0; i < 32; ++i) odd[i] = to_bfloat16(from_bfloat16(odd[i]) * fold[i / 2]);
    }

private:
    const Decoder* decoder_;
    uint16_t words_[256];
};
