// Requantizes a row of 32 sums to codes, as defined in hop.requantization. Included in a namespace (isa.h).

// The parameters of a block's codes: the output's scale and zero point for each column, and values derived from them
// and from the operands' scales.
struct Target {
    float scale[kBlock];
    int32_t zero[kBlock];
    int32_t least[kBlock], most[kBlock];  // codes of the bounds of a fused activation
    float factor[kBlock];                 // converts real values, or sums, to steps
    int64_t mantissa[kBlock], shift[kBlock];
    uint64_t bias[kBlock];  // in units of the sums
};

// Whether codes are computed from real values, by dividing by the scale or multiplying by its reciprocal.
inline bool by_real(const hop_output& o) { return o.requantize == HOP_DIVISION || o.requantize == HOP_RECIPROCAL; }

inline float steps_of(const hop_output& o, float x, float scale) {
    return std::nearbyint(o.requantize == HOP_RECIPROCAL ? x * (1.f / scale) : x / scale);
}

inline void load_target(const Job& job, int64_t row, int64_t first, int columns, Target& t) {
    const hop_output& o = job.p.output;
    for (int j = 0; j < kBlock; ++j) {
        const int64_t at = row * o.scale_row_stride + (first + (j < columns ? j : 0)) * o.scale_column_stride;
        t.scale[j] = static_cast<const float*>(job.output_scale)[at];
        t.zero[j] = o.zero_format == HOP_NONE   ? o.zero
                    : o.zero_format == HOP_INT8 ? static_cast<const int8_t*>(job.output_zero)[at]
                                                : static_cast<const uint8_t*>(job.output_zero)[at];
        const auto code = [&](float bound) {
            const float step = steps_of(o, bound, t.scale[j]) + static_cast<float>(t.zero[j]);
            const auto low = static_cast<float>(o.low), high = static_cast<float>(o.high);
            return static_cast<int32_t>(step < low ? low : step > high ? high : step);
        };
        t.least[j] = o.bounded & 1 ? code(o.bounds[0]) : o.low;
        t.most[j] = o.bounded & 2 ? code(o.bounds[1]) : o.high;
    }
}

inline int32_t limited(int64_t code, int32_t low, int32_t high) {
    return static_cast<int32_t>(code < low ? low : code > high ? high : code);
}

// hop.quantize of real values: y / scale, or y times its reciprocal, to nearest, ties to even; NaN becomes 0.
inline void codes_of_real(const hop_output& o, const float* y, const Target& t, int32_t* codes) {
    const float low = o.bounded & 1 ? o.bounds[0] : -INFINITY, high = o.bounded & 2 ? o.bounds[1] : INFINITY;
    const bool reciprocal = o.requantize == HOP_RECIPROCAL;
    for (int j = 0; j < kBlock; ++j) {
        float x = y[j];
        x = x < low ? low : x;
        x = x > high ? high : x;
        float steps = std::nearbyint(reciprocal ? x * t.factor[j] : x / t.scale[j]);
        steps = (steps == steps ? steps : 0.f) + static_cast<float>(t.zero[j]);
        steps = steps < static_cast<float>(o.low) ? static_cast<float>(o.low) : steps;
        steps = steps > static_cast<float>(o.high) ? static_cast<float>(o.high) : steps;
        codes[j] = static_cast<int32_t>(steps);
    }
}

inline void codes_by_multiplier(const int32_t* sums, const Target& t, int32_t* codes) {
    for (int j = 0; j < kBlock; ++j) {
        float steps = std::nearbyint(static_cast<float>(sums[j]) * t.factor[j]);
        steps = steps < -0x1p30f ? -0x1p30f : steps;
        steps = steps > 0x1p30f ? 0x1p30f : steps;
        codes[j] = limited(static_cast<int32_t>(steps == steps ? steps : 0.f) + t.zero[j], t.least[j], t.most[j]);
    }
}

// The 31-bit mantissa and the shift of a positive number: mantissa * 2^(shift - 31).
inline void fixed_point(double multiplier, int64_t& mantissa, int64_t& shift) {
    uint64_t bits;
    std::memcpy(&bits, &multiplier, 8);
    mantissa = static_cast<int64_t>(((bits & ((uint64_t(1) << 52) - 1)) + (uint64_t(1) << 52) + (uint64_t(1) << 21)) >> 22);
    shift = static_cast<int64_t>(bits >> 52 & 2047) - 1022;
    const bool full = mantissa == int64_t(1) << 31;
    mantissa = full ? int64_t(1) << 30 : mantissa;
    shift += full;
    const bool known = multiplier > 0 && multiplier < static_cast<double>(INFINITY) && shift >= -31;
    mantissa = !known ? 0 : shift > 30 ? (int64_t(1) << 31) - 1 : mantissa;
    shift = !known ? 0 : shift > 30 ? 30 : shift;
}

// x / 2^by, rounded to nearest; ties go up, away from zero or to even. |x| and 2^by are at most 2^62.
template <int Ties>
inline int64_t nearest(int64_t x, int64_t by) {
    const int64_t half = (int64_t(1) << by) >> 1;
    if (Ties == HOP_TFLITE) return (x + half) >> by;
    if (Ties == HOP_AWAY) return (x + half - (x < 0 && by != 0)) >> by;
    const int64_t down = x >> by, rest = x - down * (int64_t(1) << by);
    return down + (by != 0 && (rest > half || (rest == half && (down & 1))));
}

template <int Convention>
inline void codes_by_fixed_point(const int32_t* sums, const Target& t, int32_t* codes) {
    constexpr int64_t low = INT32_MIN, high = INT32_MAX;
    for (int j = 0; j < kBlock; ++j) {
        const int64_t mantissa = t.mantissa[j], shift = t.shift[j];
        int64_t steps;
        if (Convention == HOP_GEMMLOWP) {
            int64_t left = static_cast<int64_t>(sums[j]) * (int64_t(1) << (shift > 0 ? shift : 0));
            left = left < low ? low : left > high ? high : left;
            int64_t top = (left * mantissa + (int64_t(1) << 30)) >> 31;
            top = top < low ? low : top > high ? high : top;
            steps = nearest<HOP_AWAY>(top, shift < 0 ? -shift : 0);
        } else {
            steps = nearest<Convention>(static_cast<int64_t>(sums[j]) * mantissa, 31 - shift);
        }
        codes[j] = limited(steps + t.zero[j], t.least[j], t.most[j]);
    }
}

inline void codes_of_sums(const hop_output& o, const int32_t* sums, const Target& t, int32_t* codes) {
    switch (o.requantize) {
        case HOP_MULTIPLIER: return codes_by_multiplier(sums, t, codes);
        case HOP_GEMMLOWP: return codes_by_fixed_point<HOP_GEMMLOWP>(sums, t, codes);
        case HOP_TFLITE: return codes_by_fixed_point<HOP_TFLITE>(sums, t, codes);
        case HOP_AWAY: return codes_by_fixed_point<HOP_AWAY>(sums, t, codes);
        default: return codes_by_fixed_point<HOP_EVEN>(sums, t, codes);
    }
}

// A bias of real values, rounded to the units of the sums.
inline void load_rounded_bias(float lhs, const float* rhs, const float* bias, Target& t) {
    for (int j = 0; j < kBlock; ++j) {
        double steps = std::nearbyint(static_cast<double>(bias[j]) / (static_cast<double>(lhs) * rhs[j]));
        steps = steps < -0x1p32 ? -0x1p32 : steps;
        steps = steps > 0x1p32 ? 0x1p32 : steps;
        t.bias[j] = static_cast<uint64_t>(steps == steps ? static_cast<int64_t>(steps) : INT64_MIN);
    }
}

// Computes the values that depend on the operands' scales.
inline void load_factors(const hop_output& o, float lhs, const float* rhs, const float* bias, Target& t) {
    if (by_real(o)) {
        for (int j = 0; j < kBlock; ++j) t.factor[j] = 1.f / t.scale[j];
        return;
    }
    if (bias) load_rounded_bias(lhs, rhs, bias, t);
    if (o.requantize == HOP_MULTIPLIER)
        for (int j = 0; j < kBlock; ++j) t.factor[j] = lhs * rhs[j] / t.scale[j];
    else
        for (int j = 0; j < kBlock; ++j)
            fixed_point(static_cast<double>(lhs) * rhs[j] / t.scale[j], t.mantissa[j], t.shift[j]);
}

// Converts one row of sums to codes, by the output's rounding convention. `bias`: real values, or nullptr.
template <class Sum>
inline void requantize_row(
    const hop_output& o, Sum* sums, float lhs, const float* rhs, const float* bias, const Target& target, uint8_t* out, int columns) {
    int32_t codes[kBlock];
    if (by_real(o)) {
        float y[kBlock];
        for (int j = 0; j < kBlock; ++j) y[j] = static_cast<float>(sums[j]) * lhs * rhs[j];
        if (bias)
            for (int j = 0; j < kBlock; ++j) y[j] += bias[j];
        codes_of_real(o, y, target, codes);
    } else if constexpr (std::is_same_v<Sum, int32_t>) {
        if (bias)  // the sums saturate
            for (int j = 0; j < kBlock; ++j)
                sums[j] = limited(
                    static_cast<int64_t>(static_cast<uint64_t>(static_cast<int64_t>(sums[j])) + target.bias[j]), INT32_MIN, INT32_MAX);
        codes_of_sums(o, sums, target, codes);
    }
    uint8_t bytes[kBlock];
    for (int j = 0; j < kBlock; ++j) bytes[j] = static_cast<uint8_t>(codes[j]);
    std::memcpy(out, bytes, static_cast<size_t>(columns));
}

// Converts the rows of a block.
template <class Sum>
inline void requantize_rows(
    const Job& job, Sum* sums, const float* lhs, const float* rhs, const float* bias, int64_t first, int rows, int64_t column, int columns) {
    const hop_output& o = job.p.output;
    Target target;
    for (int i = 0; i < rows; ++i) {
        const bool other = i == 0 || o.scale_row_stride != 0;
        if (other) load_target(job, first + i, column, columns, target);
        if (other || std::memcmp(lhs + i, lhs + i - 1, 4) != 0) load_factors(o, lhs[i], rhs, bias, target);
        uint8_t* out = static_cast<uint8_t*>(job.output) + (first + i) * o.row_stride + column;
        requantize_row(o, sums + i * kBlock, lhs[i], rhs, bias, target, out, columns);
    }
}
