// gelu of bfloat16 rows to 8-bit integers, without its float32 results. Included in a namespace (isa.h), before run.h.
//
// gelu increases from 0 on, and is nowhere below -0.1701, so the largest element of a row determines its amax, and with
// it the scale. Codes come from the function in float32; where the quotient is near the midpoint of two codes, the
// table of correctly rounded values and a division decide. The codes are therefore those of the table.
//
//     gelu(x) = x / 2 · (1 + psi(x))        psi odd, from cubic polynomials around multiples of 1/4

constexpr float kGeluLeast = 0.1701f, kGeluMost = 31 / 4.0f;

struct GeluCoefficients {
    __m512 c[4][2];
    explicit GeluCoefficients(int function) {
        const auto& table = function == int(Function::gelu) ? functions::kGelu : functions::kGeluTanh;
        for (int k = 0; k < 4; ++k)
            for (int half = 0; half < 2; ++half) c[k][half] = _mm512_loadu_ps(table[k] + 16 * half);
    }
    HOP_MEMBER __m512 at(int k, __m512i index) const { return _mm512_permutex2var_ps(c[k][0], index, c[k][1]); }
    // Returns gelu(given) · 2 · half.
    HOP_MEMBER __m512 of(__m512 given, __m512 half) const {
        constexpr int least_magnitude = 0xa, to_quarters = 2 << 4;
        const __m512 most = _mm512_set1_ps(kGeluMost);
        const __m512 x = _mm512_max_ps(given, _mm512_set1_ps(-kGeluMost)), t = _mm512_range_ps(x, most, least_magnitude);
        const __m512i n = _mm512_castps_si512(_mm512_fmadd_ps(t, _mm512_set1_ps(4), _mm512_set1_ps(0x1.8p23f)));
        const __m512 u = _mm512_reduce_ps(t, to_quarters);
        const __m512 upper = _mm512_fmadd_ps(_mm512_fmadd_ps(at(3, n), u, at(2, n)), u, at(1, n));
        const __m512i psi = _mm512_castps_si512(_mm512_fmadd_ps(upper, u, at(0, n)));
        const __m512i odd = _mm512_ternarylogic_epi32(psi, _mm512_castps_si512(x), _mm512_set1_epi32(INT32_MIN), 0x78);
        const __m512 scaled = _mm512_mul_ps(x, half);
        return _mm512_fmadd_ps(scaled, _mm512_castsi512_ps(odd), scaled);
    }
};

// Upper bound of the error of a quotient from psi and roundings: 2^-20 before scaling, and 2^-13 of a code after.
HOP_INLINE float gelu_margin(float by) { return by * 0x1p-20f + 0x1p-13f; }

// Codes of 64 words.
HOP_INLINE void gelu_codes(const GeluCoefficients& gelu, const float* table, const uint16_t* x, float scale, uint8_t* out) {
    constexpr int largest_magnitude = 0xb;
    const float inverse = 1.0f / scale;
    const __m512 half = _mm512_set1_ps(0.5f * inverse), whole = _mm512_set1_ps(kWhole);
    const __m512 certain = _mm512_set1_ps(0.5f - gelu_margin(inverse));
    Four given;
    load(x, given, BF16{});
    __m512i n[4];
    __m512 rest[4];
    for (int k = 0; k < 4; ++k) {
        const __m512 y = gelu.of(given.v[k], half), code = _mm512_add_ps(y, whole);
        n[k] = _mm512_castps_si512(code);
        rest[k] = _mm512_sub_ps(y, _mm512_sub_ps(code, whole));
    }
    _mm512_storeu_si512(out, bytes_of<BF16>(n));
    const __m512 a = _mm512_range_ps(rest[0], rest[1], largest_magnitude);
    const __m512 b = _mm512_range_ps(rest[2], rest[3], largest_magnitude);
    const __m512 most = _mm512_range_ps(a, b, largest_magnitude);
    if (__builtin_expect(!_mm512_cmp_ps_mask(most, certain, _CMP_NLT_UQ), 1)) return;
    for (int k = 0; k < 4; ++k) n[k] = _mm512_movm_epi32(_mm512_cmp_ps_mask(_mm512_abs_ps(rest[k]), certain, _CMP_NLT_UQ));
    for (uint64_t open = _mm512_movepi8_mask(bytes_of<BF16>(n)); open; open &= open - 1) {
        const int k = __builtin_ctzll(open);
        out[k] = uint8_t(bits_of(table[x[k]] / scale + kWhole));
    }
}

static void gelu_codes(const RowsCall& c, const uint16_t* x, int64_t n, float scale, uint8_t* out) {
    const GeluCoefficients gelu(c.r.function);
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) gelu_codes(gelu, c.table, x + i, scale, out + i);
    if (i == n) return;
    uint16_t words[64] = {};
    uint8_t codes[64];
    __builtin_memcpy(words, x + i, size_t(n - i) * sizeof(words[0]));
    gelu_codes(gelu, c.table, words, scale, codes);
    __builtin_memcpy(out + i, codes, size_t(n - i));
}

// Finds the scales and codes of a piece; returns false if it must be computed in float32.
template <class T>
static bool function_piece(const RowsCall& c, const Piece& p, const Factors* given, Room& room) {
    const hop_quantizer& q = c.q.q;
    const bool is_gelu = c.r.function == int(Function::gelu) || c.r.function == int(Function::gelu_tanh);
    if (!std::is_same<T, BF16>::value || c.r.operation != HOP_FUNCTION || !is_gelu || c.r.floats || given) return false;
    if (q.format != HOP_INTEGER || q.bits != 8 || q.rule != HOP_AMAX || q.low > -127 || q.high != 127 || q.zero) return false;
    const int64_t at = p.row * c.r.blocks.cols + p.col, size = c.r.blocks.tile_cols;
    const auto* x = static_cast<const uint16_t*>(c.x) + at;
    if (size < 64) return false;  // not worth the start
    room.stats.clear(p.count, q.rule);
    for (int64_t i = 0; i < p.count; ++i) {
        const Range range = range_of_row<BF16>(x + i * size, least(size, p.cols - i * size));
        if (!range.finite || !(range.high > 0)) return false;
        const float amax = room.stats.high[i] = c.table[bits_of(range.high) >> 16];
        if (!(amax >= kGeluLeast && amax < 0x1p100f)) return false;
    }
    find_scales_f32(c.q, room.stats, p.first, p.count, room.factors);
    for (int64_t i = 0; i < p.count; ++i) {  // a floor of the amax only makes scales larger, and so codes smaller
        gelu_codes(c, x + i * size, least(size, p.cols - i * size), room.factors.by[i], c.q.codes + at + i * size);
    }
    return true;
}
