// Keys and values of a head as lines of 16 columns of four bytes, [columns / 16][quads][16][4], zeros where there are none.
// Included in a namespace, after the dot products of a level.

constexpr int kLine = 4 * kLanes;

HOP_INLINE int64_t line_count(int64_t columns) { return divide_up(columns, kLanes); }

// Columns are tokens: four elements of a token lie side by side.
static HOP_ALONE void pack_keys(const int8_t* k, int64_t stride, int64_t tokens, int64_t width, int64_t lines, uint8_t* out) {
    const int64_t whole = width / 4, quads_of = divide_up(width, 4);
    std::memset(out, 0, size_t(lines * quads_of * kLine));
    for (int64_t j = 0; j < tokens; ++j) {
        const int8_t* from = k + j * stride;
        uint8_t* to = out + j / kLanes * quads_of * kLine + j % kLanes * 4;
        for (int64_t c = 0; c < whole; ++c) std::memcpy(to + c * kLine, from + 4 * c, 4);
        if (width % 4) std::memcpy(to + whole * kLine, from + 4 * whole, size_t(width % 4));
    }
}

// -128 times the sum of each token's codes: what 128 added to each code of a query adds to a sum.
static HOP_ALONE void sum_keys(const uint8_t* packed, int64_t quads_of, int64_t lines, int32_t* out) {
    const uint8_t ones[4] = {1, 1, 1, 1};
    const Four one = four(ones);
    for (int64_t p = 0; p < lines; ++p) {
        Sums sum = sums_of(Ints{});
        for (int64_t c = 0; c < quads_of; ++c) sum = dot(sum, one, quads(packed + (p * quads_of + c) * kLine));
        store_as(out + p * kLanes, ints_of(sum) * -128);
    }
}

// Four tokens of 16 channels, side by side.
HOP_INLINE void interleave(const int8_t* const rows[4], uint8_t* to) {
#if defined(__SSE2__)
    __m128i r[4];
    for (int i = 0; i < 4; ++i) r[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i]));
    const __m128i a = _mm_unpacklo_epi8(r[0], r[1]), b = _mm_unpacklo_epi8(r[2], r[3]);
    const __m128i c = _mm_unpackhi_epi8(r[0], r[1]), d = _mm_unpackhi_epi8(r[2], r[3]);
    auto* out = reinterpret_cast<__m128i*>(to);
    _mm_storeu_si128(out, _mm_unpacklo_epi16(a, b));
    _mm_storeu_si128(out + 1, _mm_unpackhi_epi16(a, b));
    _mm_storeu_si128(out + 2, _mm_unpacklo_epi16(c, d));
    _mm_storeu_si128(out + 3, _mm_unpackhi_epi16(c, d));
#else
    for (int i = 0; i < kLanes; ++i)
        for (int t = 0; t < 4; ++t) to[4 * i + t] = uint8_t(rows[t][i]);
#endif
}

// Columns are channels: four tokens of a channel are brought side by side, in the first `quads` of `quads_of`.
static HOP_ALONE void pack_values(const int8_t* v, int64_t stride, int64_t tokens, int64_t width, int64_t quads, int64_t quads_of, uint8_t* out) {
    int8_t part[4][kLanes];
    for (int64_t c = 0; c < quads; ++c) {
        for (int64_t p = 0; p < line_count(width); ++p) {
            const int64_t there = least(kLanes, width - p * kLanes);
            const int8_t* rows[4];
            for (int t = 0; t < 4; ++t) {
                const int64_t token = 4 * c + t;
                rows[t] = v + token * stride + p * kLanes;
                if (token < tokens && there == kLanes) continue;
                std::memset(part[t], 0, kLanes);
                if (token < tokens) std::memcpy(part[t], rows[t], size_t(there));
                rows[t] = part[t];
            }
            interleave(rows, out + (p * quads_of + c) * kLine);
        }
    }
}
