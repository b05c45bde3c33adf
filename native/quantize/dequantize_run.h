// A tensor of codes, strip by strip. Included in a namespace (isa.h).

// ---- part of a strip

static HOP_ALONE void find_steps(const DequantizeCall& c, const Strip& s, float* steps) {
    const float* scale = static_cast<const float*>(c.scale) + s.first;
    const uint8_t* small = static_cast<const uint8_t*>(c.scale) + s.first;
    if (c.q.rule == HOP_MICROSCALING) {
        for (int64_t i = 0; i < s.count; ++i) steps[i] = decode_power(small[i]);
    } else if (c.q.rule == HOP_TWO_LEVEL) {
        const FloatFormat inner = inner_format();
        const float amax = static_cast<const float*>(c.second)[c.q.outer_rows ? s.row : 0];
        for (int64_t i = 0; i < s.count; ++i) steps[i] = decode_float(small[i], inner) * amax * c.q.inverse_top;
    } else {
        __builtin_memcpy(steps, scale, size_t(s.count) * 4);
    }
    for (int64_t i = 0; i < s.count; ++i) steps[i] = steps[i] == steps[i] ? steps[i] : float_of(0x7fc00000);
}

template <class T, class Decode>
static HOP_ALONE void decode_row(const DequantizeCall& c, const uint8_t* codes, int64_t n, const float* steps, Decode decode,
                       typename T::Word* out) {
    const int64_t size = c.blocks.tile_cols;
    if (size == 1) {
        for (int64_t i = 0; i < n; ++i) out[i] = T::narrow(decode(codes[i]) * steps[i]);
    } else {
        for (int64_t at = 0, i = 0; at < n; at += size, ++i)
            decode_run<T>(codes + at, least(size, n - at), steps[i], decode, out + at);
    }
}

template <class T>
static void decode_affine_row(const DequantizeCall& c, const uint8_t* zeros, const uint8_t* codes, int64_t n,
                              const float* steps, typename T::Word* out) {
    const int64_t size = c.blocks.tile_cols;
    for (int64_t at = 0, i = 0; at < n; at += size, ++i) {
        const int32_t zero = c.q.low < 0 ? int32_t(int8_t(zeros[i])) : int32_t(zeros[i]);
        decode_run<T>(codes + at, least(size, n - at), steps[i], DecodeInteger{zero, sign_of(c.q)}, out + at);
    }
}

template <class T>
static void decode_unit(const DequantizeCall& c, const Strip& s, const Unit& u) {
    const hop_quantizer& q = c.q;
    const int32_t per_byte = codes_per_byte(q);
    const int64_t row_bytes = divide_up(c.blocks.cols, per_byte);
    float steps[kColumns + 16];
    for (int64_t i = 0; i < 16; ++i) steps[s.count + i] = 0;  // vectors are read whole
    uint8_t held[kColumns];
    find_steps(c, s, steps);
    const FloatFormat f = q.format == HOP_FLOAT ? float_format(q) : FloatFormat{};
    for (int64_t r = 0; r < u.rows; ++r) {
        const int64_t row = s.row + u.row + r;
        for (int64_t done = 0; done < u.cols; done += kColumns) {
            const int64_t n = least(kColumns, u.cols - done), col = s.col + u.col + done;
            const uint8_t* codes = c.codes + row * row_bytes + col / per_byte;
            auto* out = static_cast<typename T::Word*>(c.out) + row * c.blocks.cols + col;
            const uint8_t* zeros = q.affine ? static_cast<const uint8_t*>(c.second) + s.first : nullptr;
            if (c.blocks.tile_cols > 1 && decode_quickly<T>(c, zeros, codes, n, steps, out)) continue;
            if (per_byte > 1) {
                unpack(codes, n, q.bits, held);
                codes = held;
            }
            if (q.format == HOP_FLOAT) {
                decode_row<T>(c, codes, n, steps, DecodeFloat{f}, out);
            } else if (q.format == HOP_CODEBOOK) {
                decode_row<T>(c, codes, n, steps, DecodeByBook{q.numbers}, out);
            } else if (q.affine) {
                decode_affine_row<T>(c, zeros, codes, n, steps, out);
            } else {
                decode_row<T>(c, codes, n, steps, DecodeInteger{q.zero, sign_of(q)}, out);
            }
        }
    }
}

template <class T>
static int dequantize_tensor(const DequantizeCall& c) {
    const hop_blocks& g = c.blocks;
    const Strips strips(g);
    const int threads = worth(c.threads, g.batch * g.rows * g.cols, kLarge / 2);
    const Strip first = strips[0];
    const int64_t units = Units(first).size(), cols = Units(first).cols;
    const int64_t items = strips.size() * units;
    Queue queue(items, grain_of(items, cols * Units(first).rows, threads));
    parallel(threads, [&](int, int) {
        for (int64_t i, end; queue.take(i, end);) {
            for (; i < end; ++i) {
                const Strip s = strips[i / units];
                const Units own(s);
                if (i % units < own.size()) decode_unit<T>(c, s, own[i % units]);
            }
        }
    });
    return HOP_OK;
}
