// Hand-written Adam on bfloat16 with both states quantized: values go from codes to the parameter in registers, and
// states are in lines of float32 only until the amax of their block is known. Included in a namespace (isa.h), after
// run.h.

constexpr int64_t kAhead = 1024;  // prefetch distance in elements

// float32 elements in the order of loaded bfloat16: even and odd ones in separate vectors.
struct Line : F32 {};
template <>
constexpr bool kPairs<Line> = true;

// A quantized state. Its decoder and encoder are set up once for many elements.
template <class Decode, int bits>
struct QuickState {
    const hop_state& s;
    const Decode decode;
    float* line;
    __m512i top[kStep / 64];  // largest magnitudes of each block
    float scale[kStep / 64];

    QuickState(const hop_state& state, Decode made, float* floats) : s(state), decode(made), line(floats) {}

    uint8_t* codes(int64_t at) const { return static_cast<uint8_t*>(s.data) + at * bits / 8; }

    HOP_MEMBER void read(int64_t at, __m512 step, Numbers& f) const {
        decode.template of<BF16>(load_codes(codes(at), bits), f);
        for (int k = 0; k < 4; ++k) f.v[k] = _mm512_mul_ps(f.v[k], step);
    }
    HOP_MEMBER void hold(int64_t i, const Numbers& f, __m512i& most) const {
        const __m512i magnitude = _mm512_set1_epi32(int32_t(kMagnitude));
        for (int k = 0; k < 4; ++k) {
            _mm512_store_ps(line + i + 16 * k, f.v[k]);
            most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(f.v[k]), magnitude));
        }
    }
    // Finds the scales of the blocks of n elements; returns false for NaN, infinities, and scales whose inverse may be
    // inaccurate.
    bool find_scales(int64_t n) {
        const hop_quantizer& q = *s.quantizer;
        bool even = true;
        for (int64_t i = 0; i < divide_up(n, s.block); ++i) {
            const uint32_t most = _mm512_reduce_max_epu32(top[i]);
            scale[i] = no_zero(clamped(float_of(most), q.floor, kLargest) / q.range);
            even = even && most < kInfinity && scale[i] > 0x1p-100f && scale[i] < 0x1p100f;
        }
        return even;
    }
    void in_order(int64_t n) const {
        for (int64_t i = 0; i < n; i += 32) {
            float held[32];
            __builtin_memcpy(held, line + i, sizeof held);
            for (int64_t k = 0; k < 32; ++k) line[i + k] = held[k % 2 * 16 + k / 2];
        }
    }
    void write(int64_t at, int64_t n) {
        const hop_quantizer& q = *s.quantizer;
        if (!find_scales(n)) {
            in_order(n);
            return write_state(s, at, n, line);
        }
        for (int64_t i = 0; i < divide_up(n, s.block); ++i) s.scale[at / s.block + i] = scale[i];
        const float raised = s.least * q.range;  // a value of the format
        const Factors factors{true, scale, nullptr};
        const FloatFormat f = q.format == HOP_FLOAT ? float_format(q) : FloatFormat{};
        const RowOfBlocks<Line> row{q, f, reinterpret_cast<const uint32_t*>(line), n, s.block, factors, true, bits, codes(at), raised};
        if (q.format == HOP_FLOAT) encode_float_row<Line, 64>(row);
        else encode_book_row<Line, 64>(row);
    }
};

// Updates at most kStep elements from `at` on.
template <class Decode, int bits>
static void adam_step(const hop_update& u, int64_t at, int64_t n, QuickState<Decode, bits>& m, QuickState<Decode, bits>& v,
                      float* roots) {
    const float sign = u.flags & HOP_MAXIMIZE ? -1.0f : 1.0f;
    const float* c = u.numbers;
    const __m512 decay = _mm512_set1_ps(c[0]), beta1 = _mm512_set1_ps(c[2]), rest1 = _mm512_set1_ps(c[3] * sign),
                 beta2 = _mm512_set1_ps(c[4]), rest2 = _mm512_set1_ps(c[5]), rate = _mm512_set1_ps(c[6]),
                 scale = _mm512_set1_ps(c[7]), eps = _mm512_set1_ps(c[8]);
    auto* p = static_cast<uint16_t*>(u.p) + at;
    const auto* grad = static_cast<const uint16_t*>(u.grad) + at;
    // Pipelined: decode the states of 64 elements, take roots of the previous 64, and divide by those before them.
    const auto root = [&](int64_t i) __attribute__((always_inline)) {
        for (int k = 0; k < 4; ++k) {
            const __m512 square = _mm512_load_ps(v.line + i + 16 * k);
            _mm512_store_ps(roots + i + 16 * k, _mm512_add_ps(_mm512_mul_ps(_mm512_sqrt_ps(square), scale), eps));
        }
    };
    const auto step = [&](int64_t i) __attribute__((always_inline)) {
        Four own;
        Numbers made;
        load(p + i, own, BF16{});
        __mmask16 nan = 0;
        for (int k = 0; k < 4; ++k) {
            const __m512 mean = _mm512_load_ps(m.line + i + 16 * k), below = _mm512_load_ps(roots + i + 16 * k);
            const __m512 change = _mm512_mul_ps(_mm512_div_ps(mean, below), rate);
            made.v[k] = _mm512_sub_ps(_mm512_mul_ps(own.v[k], decay), change);
            nan |= _mm512_cmp_ps_mask(made.v[k], made.v[k], _CMP_UNORD_Q);
        }
        if (__builtin_expect(nan != 0, 0)) {
            for (int k = 0; k < 4; ++k) {
                const __mmask16 number = _mm512_cmp_ps_mask(made.v[k], made.v[k], _CMP_ORD_Q);
                made.v[k] = _mm512_mask_mov_ps(_mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)), number, made.v[k]);
            }
        }
        store(made, p + i, BF16{});
    };
    const int64_t block = m.s.block;
    for (int64_t b = 0; b < divide_up(n, block); ++b) {
        const int64_t scale_at = at / block + b, end = least(n, (b + 1) * block);
        const __m512 mean_step = _mm512_set1_ps(m.s.scale[scale_at]), square_step = _mm512_set1_ps(v.s.scale[scale_at]);
        __m512i most = _mm512_setzero_si512(), most_square = most;
        for (int64_t i = b * block; i < end; i += 64) {
            Four g;
            Numbers mean, square;
            load(grad + i, g, BF16{});
            m.read(at + i, mean_step, mean);
            v.read(at + i, square_step, square);
            for (int k = 0; k < 4; ++k) {
                const __m512 part = _mm512_mul_ps(_mm512_mul_ps(g.v[k], g.v[k]), rest2);
                mean.v[k] = _mm512_add_ps(_mm512_mul_ps(mean.v[k], beta1), _mm512_mul_ps(g.v[k], rest1));
                square.v[k] = _mm512_add_ps(_mm512_mul_ps(square.v[k], beta2), part);
            }
            m.hold(i, mean, most);
            v.hold(i, square, most_square);
            if (i >= 64) root(i - 64);
            if (i >= 128) step(i - 128);
            for (int64_t line = 0; line < 64; line += 32) {
                _mm_prefetch(reinterpret_cast<const char*>(p + i + line + kAhead), _MM_HINT_T0);
                _mm_prefetch(reinterpret_cast<const char*>(grad + i + line + kAhead), _MM_HINT_T0);
            }
            _mm_prefetch(reinterpret_cast<const char*>(m.codes(at + i + kAhead)), _MM_HINT_T0);
            _mm_prefetch(reinterpret_cast<const char*>(v.codes(at + i + kAhead)), _MM_HINT_T0);
        }
        m.top[b] = most, v.top[b] = most_square;
    }
    root(n - 64);
    if (n >= 128) step(n - 128);
    step(n - 64);
    m.write(at, n);
    v.write(at, n);
}

template <int bits, class Make>
static int64_t adam_steps(const hop_update& u, int64_t begin, int64_t end, Lines& lines, Make make) {
    const auto first = make(*u.state[0].quantizer), second = make(*u.state[1].quantizer);
    using Decode = std::remove_const_t<decltype(first)>;
    QuickState<Decode, bits> m(u.state[0], first, lines.state[0]), v(u.state[1], second, lines.state[1]);
    for (int64_t n; begin < end && (n = least(kStep, end - begin)) % 64 == 0; begin += n) adam_step(u, begin, n, m, v, lines.p);
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

// Updates elements from `begin` up to the one that is returned; that is `begin` if these loops do not support the
// update.
static int64_t update_quickly(const hop_update& u, int64_t begin, int64_t end, Lines& lines) {
    const bool plain = u.rule == HOP_ADAM && u.states == 2 && !(u.flags & (HOP_COUPLED | HOP_STOCHASTIC));
    if (!plain || u.p_dtype != HOP_BF16 || u.grad_dtype != HOP_BF16 || u.state[0].block != u.state[1].block) return begin;
    bool bytes = true, few = true, floats = true;
    for (const hop_state* s : {&u.state[0], &u.state[1]}) {
        const hop_quantizer* q = s->quantizer;
        if (!q || q->rule != HOP_AMAX || s->block % 64 != 0 || !raises_simply(*s)) return begin;
        if (q->format == HOP_CODEBOOK && !(q->tables && q->tables[2049])) return begin;
        bytes = bytes && q->format == HOP_CODEBOOK && q->bits == 8 && q->size > 16 && q->index;
        few = few && q->format == HOP_CODEBOOK && q->bits == 4;
        floats = floats && q->format == HOP_FLOAT && q->bits == 8;
    }
    if (bytes) return adam_steps<8>(u, begin, end, lines, [](const hop_quantizer& q) { return BookBytes(q.tables); });
    if (few) return adam_steps<4>(u, begin, end, lines, [](const hop_quantizer& q) { return BookNumbers<true>{q.numbers}; });
    if (floats) return adam_steps<8>(u, begin, end, lines, [](const hop_quantizer& q) { return FloatNumbers(q); });
    return begin;
}
