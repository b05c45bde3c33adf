// Conversions to 16-bit floats, to nearest, ties to even. Included in a namespace (isa.h).

inline uint16_t to_bfloat16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return static_cast<uint16_t>(x == x ? rounded : 0x7fc0);
}

inline uint16_t to_float16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);  // 2^16 or more
    if (magnitude < 0x38800000) {  // below the smallest normal number: in units of 2^-24
        float tiny;
        std::memcpy(&tiny, &magnitude, 4);
        const float steps = tiny + 0.5f;  // the last bit of the sum is 2^-24
        uint32_t found;
        std::memcpy(&found, &steps, 4);
        return static_cast<uint16_t>(sign | (found - 0x3f000000));
    }
    const uint32_t rebiased = magnitude - 0x38000000;
    return static_cast<uint16_t>(sign | (rebiased + 0xfff + (rebiased >> 13 & 1)) >> 13);
}

inline float from_bfloat16(uint16_t word) {
    const uint32_t bits = static_cast<uint32_t>(word) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline float from_float16(uint16_t word) {
    const uint32_t sign = static_cast<uint32_t>(word & 0x8000) << 16, magnitude = word & 0x7fff;
    uint32_t bits = sign;
    if (magnitude >= 0x7c00) bits |= 0x7f800000 | (magnitude & 0x3ff) << 13;
    else if (magnitude >= 0x400) bits |= (magnitude << 13) + 0x38000000;
    else {
        const float tiny = static_cast<float>(magnitude) * 0x1p-24f;
        uint32_t found;
        std::memcpy(&found, &tiny, 4);
        bits |= found;
    }
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
