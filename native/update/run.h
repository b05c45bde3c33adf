// An optimizer step, some elements at a time: states are decoded to floats, updated and encoded again, all within the
// nearest caches. Included in a namespace (isa.h), after numbers.h, stats.h, scales.h and noise.
//
// Each operation is rounded separately, in the order of hop/optim/updates.py.

constexpr int64_t kStep = 2048;  // elements at a time: a multiple of every block size

struct Lines {
    alignas(64) float p[kStep], grad[kStep], state[HOP_STATES][kStep];
    alignas(64) uint8_t noise[2 * kStep];
};

// ---- floats in memory, and in lines

template <class T>
static void widen_line(const void* x, int64_t n, float* __restrict__ out) {
    const auto* __restrict__ words = static_cast<const typename T::Word*>(x);
    for (int64_t i = 0; i < n; ++i) out[i] = T::widen(words[i]);
}

template <class T>
static void narrow_line(const float* __restrict__ x, int64_t n, void* out) {
    auto* __restrict__ words = static_cast<typename T::Word*>(out);
    for (int64_t i = 0; i < n; ++i) words[i] = T::narrow(x[i]);
}

static int64_t size_of(int32_t dtype) { return dtype == HOP_F32 ? 4 : 2; }

// Returns n floats as float32: x itself, or a copy in `line`.
static float* floats_of(void* x, int32_t dtype, int64_t n, float* line) {
    if (dtype == HOP_F32) return static_cast<float*>(x);
    dtype == HOP_BF16 ? widen_line<BF16>(x, n, line) : widen_line<F16>(x, n, line);
    return line;
}

static void put_floats(const float* line, int64_t n, int32_t dtype, void* x) {
    if (dtype == HOP_BF16) narrow_line<BF16>(line, n, x);
    if (dtype == HOP_F16) narrow_line<F16>(line, n, x);
}

// Rounds to bfloat16 stochastically: 16 random bits are added to the 16 bits that are dropped, and may carry.
static void put_stochastically(const float* __restrict__ x, int64_t n, const uint8_t* __restrict__ noise, void* out) {
    auto* __restrict__ words = static_cast<uint16_t*>(out);
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t b = bits_of(x[i]), up = uint32_t(noise[2 * i]) | uint32_t(noise[2 * i + 1]) << 8;
        const bool finite = (b & kMagnitude) < kInfinity;
        words[i] = uint16_t((finite ? b + up : (b & kMagnitude) > kInfinity ? 0x7fc00000 : b) >> 16);
    }
}

// ---- states

struct Piece {
    hop_blocks blocks;
    Strip strip;

    Piece(int64_t n, int64_t block)
        : blocks{1, 1, n, 1, least(block, n), n}, strip{0, 1, 0, n, 0, divide_up(n, block)} {}
};

static void read_state(const hop_state& s, int64_t at, int64_t n, float* line) {
    const hop_quantizer& q = *s.quantizer;
    const Piece piece(n, s.block);
    const auto* codes = static_cast<const uint8_t*>(s.data) + at / codes_per_byte(q);
    decode_f32(DequantizeCall{q, piece.blocks, codes, s.scale + at / s.block, nullptr, line, 1}, piece.strip,
               Unit{0, 1, 0, n});
}

// Raises positive elements to at least `part` times the amax of their block.
static void raise_blocks(const hop_quantizer& q, float part, int64_t block, int64_t n, float* x) {
    for (int64_t at = 0; at < n; at += block) {
        const int64_t size = least(block, n - at);
        float* __restrict__ own = x + at;
        bool known = true;
        const float amax = amax_of<F32>(reinterpret_cast<const uint32_t*>(own), size, known);
        const float lowest = clamped(amax, q.floor, kLargest) * part;
        for (int64_t i = 0; i < size; ++i) {
            const float v = own[i], raised = v < lowest ? lowest : v;
            own[i] = v > 0 ? raised : v;
        }
    }
}

static void write_state(const hop_state& s, int64_t at, int64_t n, float* line) {
    constexpr int64_t most = kStep / HOP_LEAST_BLOCK;
    const hop_quantizer& q = *s.quantizer;
    const Piece piece(n, s.block);
    if (s.least > 0) raise_blocks(q, s.least, s.block, n, line);
    alignas(64) char memory[most * 53];
    Room room(memory, piece.strip.count, false);
    auto* codes = static_cast<uint8_t*>(s.data) + at / codes_per_byte(q);
    quantize_f32(QuantizeCall{q, piece.blocks, line, nullptr, false, nullptr, nullptr, 0, codes, s.scale + at / s.block, nullptr, 1, true},
                 piece.strip, nullptr, room);
}

// ---- rules

// The larger operand; NaN if either is NaN.
HOP_INLINE float maximum(float a, float b) { return a > b || a != a ? a : b; }

template <bool coupled, bool amsgrad>
static void adam(const float* c, float sign, int64_t n, float* __restrict__ p, const float* __restrict__ grad,
                 float* __restrict__ m, float* __restrict__ v, float* __restrict__ largest) {
    const float decay = c[0], weight = c[1], beta1 = c[2], rest1 = c[3], beta2 = c[4], rest2 = c[5], rate = c[6],
                scale = c[7], eps = c[8];
    for (int64_t i = 0; i < n; ++i) {
        const float own = p[i], g = coupled ? grad[i] * sign + own * weight : grad[i] * sign;
        const float mean = m[i] * beta1 + g * rest1, square = v[i] * beta2 + g * g * rest2;
        const float top = amsgrad ? maximum(largest[i], square) : square;
        m[i] = mean, v[i] = square;
        if (amsgrad) largest[i] = top;
        p[i] = own * decay - mean / (__builtin_sqrtf(top) * scale + eps) * rate;
    }
}

template <bool coupled>
static void sgd(const float* c, int32_t flags, float sign, int64_t n, float* __restrict__ p,
                const float* __restrict__ grad, float* __restrict__ momentum) {
    const float weight = c[0], factor = c[1], rest = c[2], rate = c[3];
    const bool first = c[4] != 0, nesterov = flags & HOP_NESTEROV;
    for (int64_t i = 0; momentum && i < n; ++i) {
        const float own = p[i], g = coupled ? grad[i] * sign + own * weight : grad[i] * sign;
        const float buffer = first ? g : momentum[i] * factor + g * rest;
        momentum[i] = buffer;
        p[i] = own - (nesterov ? g + buffer * factor : buffer) * rate;
    }
    for (int64_t i = 0; !momentum && i < n; ++i) {
        const float own = p[i], g = coupled ? grad[i] * sign + own * weight : grad[i] * sign;
        p[i] = own - g * rate;
    }
}

static void lion(const float* c, float sign, int64_t n, float* __restrict__ p, const float* __restrict__ grad,
                 float* __restrict__ m) {
    const float decay = c[0], beta1 = c[1], rest1 = c[2], beta2 = c[3], rest2 = c[4], rate = c[5];
    for (int64_t i = 0; i < n; ++i) {
        const float g = grad[i] * sign, mean = m[i], x = mean * beta1 + g * rest1;
        m[i] = mean * beta2 + g * rest2;
        p[i] = p[i] * decay - (float(x > 0) - float(x < 0)) * rate;
    }
}

static void update_line(const hop_update& u, int64_t n, float* p, const float* grad, float* const* state) {
    const bool coupled = u.flags & HOP_COUPLED;
    const float* c = u.numbers;
    const float sign = u.flags & HOP_MAXIMIZE ? -1.0f : 1.0f;
    if (u.rule == HOP_LION) return lion(c, sign, n, p, grad, state[0]);
    if (u.rule == HOP_SGD) {
        float* momentum = u.states ? state[0] : nullptr;
        return coupled ? sgd<true>(c, u.flags, sign, n, p, grad, momentum)
                       : sgd<false>(c, u.flags, sign, n, p, grad, momentum);
    }
    float *m = state[0], *v = state[1], *largest = state[2];
    if (u.states == 3)
        return coupled ? adam<true, true>(c, sign, n, p, grad, m, v, largest)
                       : adam<false, true>(c, sign, n, p, grad, m, v, largest);
    return coupled ? adam<true, false>(c, sign, n, p, grad, m, v, largest)
                   : adam<false, false>(c, sign, n, p, grad, m, v, largest);
}

// ---- parts

static void update_part(const hop_update& u, int64_t at, int64_t n, Lines& lines) {
    char* own = static_cast<char*>(u.p) + at * size_of(u.p_dtype);
    char* given = static_cast<char*>(const_cast<void*>(u.grad)) + at * size_of(u.grad_dtype);
    float* p = floats_of(own, u.p_dtype, n, lines.p);
    const float* grad = floats_of(given, u.grad_dtype, n, lines.grad);
    float* state[HOP_STATES] = {};
    for (int32_t i = 0; i < u.states; ++i) {
        const hop_state& s = u.state[i];
        state[i] = lines.state[i];
        if (s.quantizer) {
            read_state(s, at, n, state[i]);
        } else {
            state[i] = floats_of(static_cast<char*>(s.data) + at * size_of(s.dtype), s.dtype, n, state[i]);
        }
    }
    update_line(u, n, p, grad, state);
    if (u.flags & HOP_STOCHASTIC) {
        constexpr int64_t bytes = GROUP * BLOCK;
        for (int64_t i = 0; i < 2 * n; i += bytes)
            philox(u.seed, u.stream, static_cast<uint64_t>((2 * at + i) / BLOCK), lines.noise + i);
        put_stochastically(p, n, lines.noise, own);
    } else {
        put_floats(p, n, u.p_dtype, own);
    }
    for (int32_t i = 0; i < u.states; ++i) {
        const hop_state& s = u.state[i];
        if (s.quantizer) {
            write_state(s, at, n, state[i]);
        } else {
            put_floats(state[i], n, s.dtype, static_cast<char*>(s.data) + at * size_of(s.dtype));
        }
    }
}
