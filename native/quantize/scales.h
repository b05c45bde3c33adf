// The rules: from statistics of blocks to their scales. Included in a namespace (isa.h).

HOP_INLINE float clamped(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

HOP_INLINE float no_zero(float scale) { return scale == 0 ? 1.0f : scale; }

static TwoLevel two_level(const hop_quantizer& q, float outer) {
    const float quotient = q.top / outer, bounded = quotient > kLargest ? kLargest : quotient;
    const float factor = outer == 0 || bounded == 0 ? 1.0f : bounded, reciprocal = 1.0f / factor;
    const FloatFormat inner = inner_format();
    TwoLevel t;
    t.scaled = factor * q.inverse;
    const uint32_t codes = t.scaled > 0 ? 128 : 256;  // a given global_amax may have any sign
    for (uint32_t code = 0; code < codes; ++code) {
        const float inverse = 1.0f / (decode_float(code, inner) * reciprocal);
        t.inverse[code] = inverse > kLargest ? kLargest : inverse;
    }
    return t;
}

HOP_INLINE float current_factor(const hop_quantizer& q, float amax, float largest) {
    const float bounded = amax < q.floor ? q.floor : amax;
    const float most = q.most_of_dtype ? largest : kLargest;
    float factor = q.range / bounded;
    if (factor > kLargest) factor = most;
    if (bounded == 0) factor = 1.0f;
    return q.power_of_two ? floor_power(factor) : factor;
}

// Scales and zero points of HOP_MINMAX.
static void find_ranges(const QuantizeCall& c, const Stats& s, int64_t first, int64_t count, Factors& f) {
    float* __restrict__ scale = static_cast<float*>(c.scale) + first;
    uint8_t* __restrict__ zero = static_cast<uint8_t*>(c.second) + first;
    float* __restrict__ by = f.by;
    const float* __restrict__ most = s.high;
    const float* __restrict__ least = s.low;
    const float low = float(c.q.low), codes = float(c.q.high - c.q.low), range = c.q.range;
    for (int64_t i = 0; i < count; ++i) {
        const float span = most[i] - least[i], own = no_zero((span > kLargest ? kLargest : span) / range);
        const float steps = clamped(least[i] / own, -codes - 1, 0.0f) + kWhole - kWhole;
        by[i] = scale[i] = own;
        zero[i] = uint8_t(int32_t(own == own ? clamped(low - steps, low, low + codes) : low));
    }
    __builtin_memcpy(f.zero, zero, size_t(count));
}

// Finds the scales of `count` blocks, from block `first` of the tensor on. `largest`: the largest number of x's dtype.
static void find_scales(const QuantizeCall& c, float largest, const Stats& s, int64_t first, int64_t count,
                        const TwoLevel* outer, Factors& f) {
    const hop_quantizer q = c.q;  // a copy, which no store to codes can change
    float* __restrict__ scale = static_cast<float*>(c.scale) + first;
    uint8_t* __restrict__ small = static_cast<uint8_t*>(c.scale) + first;
    float* __restrict__ by = f.by;
    const float* __restrict__ high = s.high;
    f.divides = q.rule == HOP_AMAX || q.rule == HOP_MINMAX || q.rule == HOP_ABSMEAN;
    switch (q.rule) {
        case HOP_AMAX: {
            const float floor = q.floor, range = q.range;
            for (int64_t i = 0; i < count; ++i) by[i] = scale[i] = no_zero(clamped(high[i], floor, kLargest) / range);
            break;
        }
        case HOP_MINMAX: return find_ranges(c, s, first, count, f);
        case HOP_ABSMEAN:
            for (int64_t i = 0; i < count; ++i) {
                const double n = s.count[i] > 1 ? double(s.count[i]) : 1.0;
                by[i] = scale[i] = no_zero(float(s.sum[i] / n));
            }
            break;
        case HOP_CURRENT_SCALING:
            for (int64_t i = 0; i < count; ++i) {
                by[i] = current_factor(q, high[i], largest);
                scale[i] = 1.0f / by[i];
            }
            break;
        case HOP_MICROSCALING: {
            const float inverse = q.inverse;
            for (int64_t i = 0; q.rounding != HOP_MX_RCEIL && i < count; ++i) {
                small[i] = uint8_t(encode_exponent(high[i], q));
                by[i] = inverse_exponent(small[i]);
            }
            for (int64_t i = 0; q.rounding == HOP_MX_RCEIL && i < count; ++i) {
                const uint32_t code = encode_power(high[i] * inverse);
                small[i] = uint8_t(code);
                by[i] = inverse_power(code);
            }
            break;
        }
        case HOP_TWO_LEVEL: {
            const FloatFormat inner = inner_format();
            const float scaled = outer->scaled;
            for (int64_t i = 0; i < count; ++i) small[i] = uint8_t(encode_float<false>(high[i] * scaled, inner));
            for (int64_t i = 0; i < count; ++i) by[i] = outer->inverse[small[i]];
            break;
        }
    }
}

// The same with scales from the caller; not for HOP_TWO_LEVEL.
static void take_scales(const QuantizeCall& c, int64_t first, int64_t count, Factors& f) {
    const hop_quantizer& q = c.q;
    const float* given = static_cast<const float*>(c.given_scale) + first;
    const uint8_t* codes = static_cast<const uint8_t*>(c.given_scale) + first;
    float* scale = static_cast<float*>(c.scale) + first;
    f.divides = q.rule != HOP_MICROSCALING;
    for (int64_t i = 0; i < count; ++i) {
        if (q.rule == HOP_MICROSCALING) {
            const uint32_t code = c.given_codes ? codes[i] : encode_power(given[i]);
            static_cast<uint8_t*>(c.scale)[first + i] = uint8_t(code);
            f.by[i] = inverse_power(code);
        } else {
            const bool rounds = q.rule == HOP_CURRENT_SCALING && q.power_of_two;
            f.by[i] = scale[i] = rounds ? 1.0f / floor_power(1.0f / given[i]) : given[i];
        }
        if (q.affine) f.zero[i] = static_cast<uint8_t*>(c.second)[first + i] = c.given_zero_point[first + i];
    }
}
