// The replacement of dequantize_avx512.h for other instruction sets. Included in a namespace (isa.h).

template <class T>
HOP_INLINE bool decode_quickly(const DequantizeCall&, const uint8_t*, const uint8_t*, int64_t, const float*,
                               typename T::Word*) {
    return false;
}
