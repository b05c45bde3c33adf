// Dequantizes a tensor, strip by strip. Included in a namespace (isa.h).

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

template <class Decode>
static HOP_ALONE void decode_row(const DequantizeCall& c, const uint8_t* codes, int64_t n, const float* steps, Decode decode,
                                 float* out) {
    const int64_t size = c.blocks.tile_cols;
    if (size == 1) return decode_run<1>(codes, n, steps, decode, out);
    for (int64_t at = 0, i = 0; at < n; at += size, ++i)
        decode_run<0>(codes + at, least(size, n - at), steps + i, decode, out + at);
}

static HOP_ALONE void decode_affine_row(const DequantizeCall& c, const uint8_t* zeros, const uint8_t* codes, int64_t n,
                                        const float* steps, float* out) {
    const int64_t size = c.blocks.tile_cols;
    for (int64_t at = 0, i = 0; at < n; at += size, ++i) {
        const int32_t zero = c.q.low < 0 ? int32_t(int8_t(zeros[i])) : int32_t(zeros[i]);
        decode_run<0>(codes + at, least(size, n - at), steps + i, DecodeInteger{zero, sign_of(c.q)}, out + at);
    }
}

// Decodes at most kColumns elements of a row to float32.
static HOP_ALONE void decode_line(const DequantizeCall& c, const uint8_t* zeros, const uint8_t* codes, int64_t n,
                                  const float* steps, float* out) {
    const hop_quantizer& q = c.q;
    if (c.blocks.tile_cols > 1 && decode_quickly<F32>(c, zeros, codes, n, steps, reinterpret_cast<uint32_t*>(out))) return;
    uint8_t held[kColumns];
    if (codes_per_byte(q) > 1) {
        unpack(codes, n, q.bits, held);
        codes = held;
    }
    if (q.format == HOP_FLOAT) {
        decode_row(c, codes, n, steps, DecodeFloat{float_format(q)}, out);
    } else if (q.format == HOP_CODEBOOK) {
        decode_row(c, codes, n, steps, DecodeByBook{q.numbers}, out);
    } else if (q.affine) {
        decode_affine_row(c, zeros, codes, n, steps, out);
    } else {
        decode_row(c, codes, n, steps, DecodeInteger{q.zero, sign_of(q)}, out);
    }
}

template <class T>
static void decode_unit(const DequantizeCall& c, const Strip& s, const Unit& u) {
    const int32_t per_byte = codes_per_byte(c.q);
    const int64_t row_bytes = divide_up(c.blocks.cols, per_byte);
    float steps[kColumns + 16];
    for (int64_t i = 0; i < 16; ++i) steps[s.count + i] = 0;  // whole vectors are read
    find_steps(c, s, steps);
    const uint8_t* zeros = c.q.affine ? static_cast<const uint8_t*>(c.second) + s.first : nullptr;
    for (int64_t r = 0; r < u.rows; ++r) {
        const int64_t row = s.row + u.row + r;
        for (int64_t done = 0; done < u.cols; done += kColumns) {
            const int64_t n = least(kColumns, u.cols - done), col = s.col + u.col + done;
            const uint8_t* codes = c.codes + row * row_bytes + col / per_byte;
            auto* out = static_cast<typename T::Word*>(c.out) + row * c.blocks.cols + col;
            if constexpr (std::is_same<T, F32>::value) {
                decode_line(c, zeros, codes, n, steps, reinterpret_cast<float*>(out));
            } else if (c.blocks.tile_cols == 1 || !decode_quickly<T>(c, zeros, codes, n, steps, out)) {
                alignas(64) float line[kColumns];
                decode_line(c, zeros, codes, n, steps, line);
                narrow_line<T>(line, n, out);
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
