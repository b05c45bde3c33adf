// Hand-written Adam on float32 and bfloat16 with both states quantized: values go from codes to the parameter in
// registers, and states are in lines of float32 only until the amax of their block is known. Included in a namespace
// (isa.h), after run.h.

HOP_INLINE void store(uint32_t* p, const Four& f, F32) {
    for (int k = 0; k < 4; ++k) _mm256_storeu_ps(reinterpret_cast<float*>(p) + 8 * k, f.v[k]);
}

// Rounded like BF16::narrow.
HOP_INLINE void store(uint16_t* p, const Four& f, BF16) {
    __m256i n[4];
    for (int k = 0; k < 4; ++k) {
        const __m256i b = _mm256_castps_si256(f.v[k]), odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
        const __m256i up = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(b, odd), _mm256_set1_epi32(0x7fff)), 16);
        const __m256 nan = _mm256_cmp_ps(f.v[k], f.v[k], _CMP_UNORD_Q);
        n[k] = _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(nan));
    }
    for (int k = 0; k < 2; ++k) {
        const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(n[2 * k], n[2 * k + 1]), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16 * k), words);
    }
}

// Elements whose states, and the data prefetched for the next ones, fit in the first-level cache.
constexpr int64_t kQuickStep = 512;
constexpr int64_t kAhead = 1024;     // prefetch distance in elements

// A state with blocks of a multiple of 32 elements.
template <class Decode>
struct QuickState {
    const hop_state& s;
    const Decode decode;
    float* line;
    __m256i top[kStep / 32];  // largest magnitudes of each block
    float scale[kStep / 32], inverse[kStep / 32];

    QuickState(const hop_state& state, const Decode& made, float* floats) : s(state), decode(made), line(floats) {}

    uint8_t* codes(int64_t at) const { return static_cast<uint8_t*>(s.data) + at * Decode::bits / 8; }

    HOP_MEMBER void read(int64_t at, __m256 step, Numbers& f) const {
        decode.of(codes(at), f);
        for (int k = 0; k < 4; ++k) f.v[k] = _mm256_mul_ps(f.v[k], step);
    }
    HOP_MEMBER void hold(int64_t i, const Numbers& f, __m256i& most) const {
        for (int k = 0; k < 4; ++k) {
            _mm256_store_ps(line + i + 8 * k, f.v[k]);
            most = _mm256_max_epu32(most, magnitude_of(f.v[k]));
        }
    }
    // Finds the scales of the blocks of n elements; returns false for NaN, infinities, and scales whose inverse may be
    // inaccurate.
    bool find_scales(int64_t n) {
        const hop_quantizer& q = *s.quantizer;
        bool even = true;
        const int64_t blocks = divide_up(n, s.block);
        for (int64_t i = 0; i < blocks; ++i) {
            uint32_t lanes[8], most = 0;
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), top[i]);
            for (const uint32_t own : lanes) most = own > most ? own : most;
            even = even && most < kInfinity;
            scale[i] = no_zero(clamped(float_of(most), q.floor, kLargest) / q.range);
        }
        return even && invert(scale, blocks, 1, inverse);
    }
    template <class Codes>
    void encode(int64_t at, int64_t n, const Factors& by, const Codes& given) const {
        const hop_quantizer& q = *s.quantizer;
        const auto* words = reinterpret_cast<const uint32_t*>(line);
        const FloatFormat none{};
        encode_all<F32, false>(RowOfBlocks<F32>{q, none, words, n, s.block, by, Decode::bits, false, codes(at)}, given);
    }
    void write(int64_t at, int64_t n) {
        const hop_quantizer& q = *s.quantizer;
        if (!find_scales(n)) return write_state(s, at, n, line);
        for (int64_t i = 0; i < divide_up(n, s.block); ++i) s.scale[at / s.block + i] = scale[i];
        const float raised = s.least * q.range;  // a value of the format
        const Factors by{true, scale, nullptr};
        if (q.format == HOP_FLOAT) {
            const FloatFormat f = float_format(q);
            if (s.least > 0) return encode(at, n, by, FloatCodes<F32, false, true, true>{f, by, inverse, raised});
            return encode(at, n, by, FloatCodes<F32, false, true>{f, by, inverse, 0});
        }
        if (q.numbers[0] < 0) return encode(at, n, by, BinCodes<F32, false, true>{q, by, inverse, 0});
        if (s.least > 0) return encode(at, n, by, BinCodes<F32, false, false, true>{q, by, inverse, raised});
        encode(at, n, by, BinCodes<F32, false, false>{q, by, inverse, 0});
    }
};

// Updates at most kStep elements from `at` on.
template <class T, class Decode>
static void adam_step(const hop_update& u, int64_t at, int64_t n, QuickState<Decode>& m, QuickState<Decode>& v) {
    const float* c = u.numbers;
    const __m256 sign = _mm256_set1_ps(u.flags & HOP_MAXIMIZE ? -1.0f : 1.0f), decay = _mm256_set1_ps(c[0]);
    const __m256 beta1 = _mm256_set1_ps(c[2]), rest1 = _mm256_set1_ps(c[3]);
    const __m256 beta2 = _mm256_set1_ps(c[4]), rest2 = _mm256_set1_ps(c[5]);
    const __m256 rate = _mm256_set1_ps(c[6]), scale = _mm256_set1_ps(c[7]), eps = _mm256_set1_ps(c[8]);
    auto* p = static_cast<typename T::Word*>(u.p) + at;
    const auto* grad = static_cast<const typename T::Word*>(u.grad) + at;
    const int64_t block = m.s.block;
    // Roots and quotients of elements overlap with decoding the states of the next ones.
    const auto step = [&](int64_t i) HOP_INLINED {
        Four own;
        load(p + i, own, T{});
        __m256 root[4];
        for (int k = 0; k < 4; ++k) root[k] = _mm256_sqrt_ps(_mm256_load_ps(v.line + i + 8 * k));
        for (int k = 0; k < 4; ++k) {
            const __m256 below = _mm256_add_ps(_mm256_mul_ps(root[k], scale), eps);
            const __m256 quotient = _mm256_div_ps(_mm256_load_ps(m.line + i + 8 * k), below);
            own.v[k] = _mm256_sub_ps(_mm256_mul_ps(own.v[k], decay), _mm256_mul_ps(quotient, rate));
        }
        store(p + i, own, T{});
    };
    for (int64_t b = 0; b * block < n; ++b) {
        const int64_t end = least(n, (b + 1) * block), scale_at = at / block + b;
        const __m256 mean_step = _mm256_set1_ps(m.s.scale[scale_at]), square_step = _mm256_set1_ps(v.s.scale[scale_at]);
        __m256i most = _mm256_setzero_si256(), most_square = most;
        for (int64_t i = b * block; i < end; i += 32) {
            if (i) step(i - 32);
            Four g;
            Numbers mean, square;
            load(grad + i, g, T{});
            m.read(at + i, mean_step, mean);
            v.read(at + i, square_step, square);
            for (int k = 0; k < 4; ++k) {
                const __m256 x = _mm256_mul_ps(g.v[k], sign), part = _mm256_mul_ps(_mm256_mul_ps(x, x), rest2);
                mean.v[k] = _mm256_add_ps(_mm256_mul_ps(mean.v[k], beta1), _mm256_mul_ps(x, rest1));
                square.v[k] = _mm256_add_ps(_mm256_mul_ps(square.v[k], beta2), part);
            }
            fetch(p + i + kAhead), fetch(grad + i + kAhead);
            fetch(m.codes(at + i + kAhead)), fetch(v.codes(at + i + kAhead));
            m.hold(i, mean, most);
            v.hold(i, square, most_square);
        }
        m.top[b] = most, v.top[b] = most_square;
    }
    step(n - 32);
    m.write(at, n);
    v.write(at, n);
}

template <class T, class Decode>
static int64_t adam_steps(const hop_update& u, int64_t begin, int64_t end, Lines& lines, const Decode& first,
                          const Decode& second) {
    QuickState<Decode> m(u.state[0], first, lines.state[0]), v(u.state[1], second, lines.state[1]);
    const int64_t step = m.s.block > kQuickStep ? m.s.block : kQuickStep;
    for (int64_t n; begin < end && (n = least(step, end - begin)) % 32 == 0; begin += n) adam_step<T>(u, begin, n, m, v);
    return begin;
}

// Whether the value to which elements are raised (hop_state::least) is a value of the format, and so not near a
// threshold; codebooks must not have negative values.
static bool raises_simply(const hop_state& s) {
    const hop_quantizer& q = *s.quantizer;
    const float raised = s.least * q.range;
    const auto close = [&](float number) { return std::fabs(raised - number) <= 0x1p-20f * raised; };
    if (q.format == HOP_FLOAT) {
        const FloatFormat f = float_format(q);
        return s.least <= 0 || close(decode_float(encode_float<true>(raised, f), f));
    }
    bool found = s.least <= 0;
    for (int32_t i = 0; i < q.size; ++i) found = found || (close(q.numbers[i]) && q.numbers[0] >= 0);
    return found;
}

static bool is_e4m3(const hop_quantizer& q) { return q.mantissa_bits == 3 && q.bias == 7 && q.largest == 0x7e && q.keeps_nan; }

template <class T>
static int64_t update_quickly_of(const hop_update& u, int64_t begin, int64_t end, Lines& lines) {
    bool bytes = true, few = true, floats = true;
    for (const hop_state* s : {&u.state[0], &u.state[1]}) {
        const hop_quantizer* q = s->quantizer;
        if (!q || q->rule != HOP_AMAX || s->block % 32 != 0 || !raises_simply(*s)) return begin;
        if (q->format == HOP_CODEBOOK && !(q->tables && q->tables[kHasBins])) return begin;
        bytes = bytes && q->format == HOP_CODEBOOK && q->bits == 8;
        few = few && q->format == HOP_CODEBOOK && q->bits == 4;
        floats = floats && q->format == HOP_FLOAT && q->bits == 8 && is_e4m3(*q);
    }
    const float *first = u.state[0].quantizer->numbers, *second = u.state[1].quantizer->numbers;
    if (bytes) return adam_steps<T>(u, begin, end, lines, BookNumbers{first}, BookNumbers{second});
    if (few) return adam_steps<T>(u, begin, end, lines, FewNumbers(first), FewNumbers(second));
    if (floats) return adam_steps<T>(u, begin, end, lines, ByteFloatNumbers<true>(), ByteFloatNumbers<true>());
    return begin;
}

// Updates elements from `begin` up to the one that is returned; that is `begin` if these loops do not support the
// update.
static int64_t update_quickly(const hop_update& u, int64_t begin, int64_t end, Lines& lines) {
    const bool plain = u.rule == HOP_ADAM && u.states == 2 && !(u.flags & (HOP_COUPLED | HOP_STOCHASTIC));
    if (!plain || u.p_dtype != u.grad_dtype || u.state[0].block != u.state[1].block) return begin;
    if (u.p_dtype == HOP_F32) return update_quickly_of<F32>(u, begin, end, lines);
    return u.p_dtype == HOP_BF16 ? update_quickly_of<BF16>(u, begin, end, lines) : begin;
}
