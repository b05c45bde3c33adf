// Functions of rows to 8-bit integers, without their float32 results. Included in a namespace (isa.h), before run.h.
//
// If the sign of a function's slope is known, its largest magnitude in a row is at an end of the row's range, so one
// correctly rounded function value gives the scale, unless it is passed. Codes come from a float32 approximation; where
// that is near the midpoint of two codes, the correctly rounded function and a division decide. The codes are therefore
// those of the function.

using Eight = __m256;

HOP_INLINE Eight load_eight(const uint32_t* x, F32) { return _mm256_loadu_ps(reinterpret_cast<const float*>(x)); }
HOP_INLINE Eight load_eight(const uint16_t* x, BF16) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}
HOP_INLINE Eight load_eight(const uint16_t* x, F16) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}

// ---- approximations, whose error is at most kNear · |y| + kNear

constexpr float kNear = 0x1p-20f;

template <size_t n>
HOP_INLINE Eight near_horner(const float (&c)[n], Eight x) {
    Eight y = eight(c[n - 1]);
    for (int i = int(n) - 2; i >= 0; --i) y = _mm256_fmadd_ps(y, x, eight(c[i]));
    return y;
}

// e^x, with x clamped to ±86.
HOP_INLINE Eight near_exp(Eight given) {
    const Eight x = _mm256_min_ps(eight(86), _mm256_max_ps(eight(-86), given));
    const Eight t = _mm256_fmadd_ps(x, eight(0x1.715476p+0f), eight(kWhole)), n = _mm256_sub_ps(t, eight(kWhole));
    const Eight y = near_horner(functions::kExpNear, _mm256_fnmadd_ps(n, eight(0x1.62e43p-1f), x));
    const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), exponent));
}

HOP_INLINE Eight negated(Eight x) { return _mm256_xor_ps(x, eight(-0.0f)); }
HOP_INLINE Eight near_half(Eight x, Eight e) { return _mm256_div_ps(x, _mm256_add_ps(e, eight(1))); }

struct NearSigmoid {
    static constexpr float least = 0;  // lower bound of an amax that the largest element determines
    HOP_INLINE Eight of(Eight x) { return near_half(eight(1), near_exp(negated(x))); }
};

struct NearTanh {
    static constexpr float least = -1;  // odd and increasing: the largest magnitude of x determines the amax
    HOP_INLINE Eight of(Eight x) {
        return _mm256_sub_ps(eight(1), near_half(eight(2), near_exp(_mm256_add_ps(x, x))));
    }
};

struct NearSilu {
    static constexpr float least = 0.2785f;
    HOP_INLINE Eight of(Eight x) {
        x = _mm256_max_ps(eight(-86), x);
        return near_half(x, near_exp(negated(x)));
    }
};

struct NearGeluTanh {
    static constexpr float least = 0.1701f;
    HOP_INLINE Eight of(Eight x) {
        x = _mm256_max_ps(eight(-14), x);
        const Eight cube = _mm256_mul_ps(_mm256_mul_ps(x, x), x);
        const Eight w = _mm256_mul_ps(_mm256_fmadd_ps(cube, eight(0.044715f), x), eight(-0x1.988454p+0f));  // -2 sqrt(2 / pi)
        return near_half(x, near_exp(w));
    }
};

struct NearGelu {
    static constexpr float least = 0.1701f;
    HOP_INLINE Eight of(Eight x) {
        constexpr float most = functions::kPhiMost;
        x = _mm256_max_ps(eight(-most), x);
        const Eight t = _mm256_min_ps(eight(most), x), square = _mm256_mul_ps(t, t), half = _mm256_mul_ps(x, eight(0.5f));
        const Eight odd = _mm256_mul_ps(t, near_horner(functions::kPhiAbove, square));  // 2 Phi(x) - 1
        return _mm256_fmadd_ps(half, _mm256_div_ps(odd, near_horner(functions::kPhiBelow, square)), half);
    }
};

// ---- codes

struct FunctionCodes {
    const RowsCall& c;
    float scale, inverse, certain;
    int32_t zero;
    Bounds bounds;

    FunctionCodes(const RowsCall& call, float by, int32_t code_of_0)
        : c(call), scale(by), inverse(1.0f / by), certain(0.5f - margin(1.0f / by)), zero(code_of_0),
          bounds(call.q.q, code_of_0) {}

    // Upper bound of the error of a quotient, from the approximation and from roundings; codes that saturate may be off
    // by more.
    static float margin(float inverse) { return inverse * (2 * kNear) + 0x1p-11f; }

    template <class T>
    HOP_ALONE void decide(const typename T::Word* x, uint32_t open, uint8_t* out) const {
        for (; open; open &= open - 1) {
            const int k = __builtin_ctz(open);
            float y = T::widen(x[k]);
            if (c.table) y = c.table[x[k]];
            else evaluate(Function(c.r.function), &y, &y, 1);
            out[k] = uint8_t(encode_integer(y / scale, bounds, uint32_t(zero)));
        }
    }

    // Codes of 32 elements.
    template <class T, class F>
    HOP_MEMBER void some(const typename T::Word* x, uint8_t* out) const {
        const Eight limit = eight(1024);  // beyond the range of all codes
        __m256i n[4];
        uint32_t open = 0;
        for (int k = 0; k < 4; ++k) {
            const Eight y = _mm256_mul_ps(F::of(load_eight(x + 8 * k, T{})), eight(inverse));
            const Eight steps = _mm256_max_ps(negated(limit), _mm256_min_ps(limit, y));
            const __m256i whole = _mm256_cvtps_epi32(steps);
            const Eight rest = _mm256_andnot_ps(eight(-0.0f), _mm256_sub_ps(steps, _mm256_cvtepi32_ps(whole)));
            const Eight near = _mm256_or_ps(_mm256_cmp_ps(rest, eight(certain), _CMP_NLT_UQ), _mm256_cmp_ps(y, y, _CMP_UNORD_Q));
            open |= uint32_t(_mm256_movemask_ps(near)) << (8 * k);
            n[k] = _mm256_add_epi32(whole, _mm256_set1_epi32(zero));
        }
        const __m256i low = _mm256_packs_epi32(n[0], n[1]), high = _mm256_packs_epi32(n[2], n[3]);
        const __m256i lowest = _mm256_set1_epi16(int16_t(c.q.q.low));
        const __m256i a = _mm256_max_epi16(low, lowest), b = _mm256_max_epi16(high, lowest);
        const __m256i bytes = c.q.q.low < 0 ? _mm256_packs_epi16(a, b) : _mm256_packus_epi16(a, b);
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permutevar8x32_epi32(bytes, order));
        if (__builtin_expect(open != 0, 0)) decide<T>(x, open, out);
    }

    template <class T, class F>
    void all(const typename T::Word* x, int64_t n, uint8_t* out) const {
        int64_t i = 0;
        for (; i + 32 <= n; i += 32) some<T, F>(x + i, out + i);
        if (i == n) return;
        typename T::Word rest[32] = {};
        uint8_t codes[32];
        __builtin_memcpy(rest, x + i, size_t(n - i) * sizeof(rest[0]));
        some<T, F>(rest, codes);
        __builtin_memcpy(out + i, codes, size_t(n - i));
    }
};

// The amax of a function over a range of elements; NaN if it is not known.
template <class T, class F>
static float amax_of_function(const RowsCall& c, const Range& range) {
    if (!range.finite) return quiet_nan();
    float y = F::least < 0 ? range.amax() : range.high;
    if (F::least > 0 && !(y > 0)) return quiet_nan();
    if (c.table) y = c.table[T::narrow(y)];
    else evaluate(Function(c.r.function), &y, &y, 1);
    return y >= F::least ? y : quiet_nan();
}

// Finds the scales and codes of a piece; returns false if it must be computed in float32.
template <class T, class F>
static bool piece_of(const RowsCall& c, const Piece& p, const Factors* given, Room& room) {
    constexpr float least_scale = 0x1p-16f, most_scale = 0x1p100f;
    const hop_quantizer& q = c.q.q;
    const int64_t at = p.row * c.r.blocks.cols + p.col, size = c.r.blocks.tile_cols;
    const auto* x = static_cast<const typename T::Word*>(c.x) + at;
    const float* by = given ? given->by + p.first : room.factors.by;
    if (!given) {
        room.stats.clear(p.count, q.rule);
        for (int64_t i = 0; i < p.count; ++i) {
            const float amax = amax_of_function<T, F>(c, range_of_row<T>(x + i * size, least(size, p.cols - i * size)));
            if (!(amax < 0x1p100f)) return false;
            room.stats.high[i] = amax;
        }
        find_scales_f32(c.q, room.stats, p.first, p.count, room.factors);
    }
    for (int64_t i = 0; i < p.count; ++i)
        if (!(by[i] > least_scale && by[i] < most_scale)) return false;
    for (int64_t i = 0; i < p.count; ++i) {  // a floor of the amax only makes scales larger, and so codes smaller
        const int32_t zero = given && given->zero ? code_of_zero(q, given->zero[p.first + i]) : q.zero;
        FunctionCodes(c, by[i], zero).template all<T, F>(x + i * size, least(size, p.cols - i * size), c.q.codes + at + i * size);
    }
    return true;
}

template <class T>
static bool function_piece(const RowsCall& c, const Piece& p, const Factors* given, Room& room) {
    const hop_quantizer& q = c.q.q;
    if (!std::is_same<T, F32>::value) return false;  // float32 only: the tables of 16-bit floats are faster
    if (c.r.operation != HOP_FUNCTION || c.r.floats || q.format != HOP_INTEGER || q.bits != 8) return false;
    if (c.r.blocks.tile_cols < 64) return false;  // not worth the start
    if (!given && (q.rule != HOP_AMAX || q.zero)) return false;
    if (q.high != (q.low < 0 ? 127 : 255)) return false;
    switch (c.r.function) {
        case int(Function::gelu): return piece_of<T, NearGelu>(c, p, given, room);
        case int(Function::gelu_tanh): return piece_of<T, NearGeluTanh>(c, p, given, room);
        case int(Function::silu): return piece_of<T, NearSilu>(c, p, given, room);
        case int(Function::sigmoid): return piece_of<T, NearSigmoid>(c, p, given, room);
        case int(Function::tanh): return piece_of<T, NearTanh>(c, p, given, room);
        default: return false;
    }
}
