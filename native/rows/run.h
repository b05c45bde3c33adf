// Computes rows in float32, split among threads, and casts or quantizes them. Included in a namespace (isa.h).

// The memory of one thread.
struct RowRoom {
    float *row, *more;
    char* rest;

    static size_t bytes(int64_t n, bool two) { return size_t(divide_up(n, 16) * 64 * (two ? 2 : 1)); }
    RowRoom(char* memory, int64_t n, bool two)
        : row(reinterpret_cast<float*>(memory)),
          more(reinterpret_cast<float*>(memory + (two ? divide_up(n, 16) * 64 : 0))),
          rest(memory + bytes(n, two)) {}
};

// Computes elements `at` to `at + n - 1` in float32.
template <class T>
static void compute(const RowsCall& c, int64_t at, int64_t n, RowRoom& room) {
    const auto* x = static_cast<const typename T::Word*>(c.x) + at;
    switch (c.r.operation) {
        case HOP_LAYER_NORM: return layer_norm_row<T>(c, x, n, room.row);
        case HOP_RMS_NORM: return rms_norm_row<T>(c, x, n, room.row);
        case HOP_SOFTMAX:
        case HOP_LOG_SOFTMAX: return softmax_row<T>(c, x, n, room.row, room.more);
        case HOP_HADAMARD: return hadamard_row<T>(c, x, n, room.row);
        default: function_row<T>(c, x, n, room.row);
    }
    if (c.r.operation == HOP_GATED) multiply_row(c, at, n, room.row);
}

// ---- floats

template <class T>
static void store_words(float* __restrict__ y, int64_t n, void* out, int64_t at, bool back) {
    auto* __restrict__ to = static_cast<typename T::Word*>(out) + at;
    for (int64_t i = 0; i < n; ++i) to[i] = T::narrow(y[i]);
    if (back && !std::is_same<T, F32>::value)
        for (int64_t i = 0; i < n; ++i) y[i] = T::widen(to[i]);
}

// Stores elements in the result's float dtype; with `back`, y becomes the stored values in float32.
static void store_floats(const RowsCall& c, float* y, int64_t n, void* out, int64_t at, bool back = false) {
    switch (c.r.result_dtype) {
        case HOP_F32: return store_words<F32>(y, n, out, at, back);
        case HOP_BF16: return store_words<BF16>(y, n, out, at, back);
        default: return store_words<F16>(y, n, out, at, back);
    }
}

template <class T>
static int compute_floats(const RowsCall& c) {
    const int64_t all = c.r.count * c.r.length, size = c.sums() ? c.r.length : kColumns, items = divide_up(all, size);
    const bool two = c.r.operation == HOP_LOG_SOFTMAX;
    const int threads = worth(c.threads, all, kLarge / 8);
    std::atomic<int> result{HOP_OK};
    Queue queue(items, grain_of(items, size, threads));
    parallel(threads, [&](int, int) {
        char* memory = scratch(RowRoom::bytes(size, two));
        if (!memory) {
            result = HOP_NO_MEMORY;
            return;
        }
        RowRoom room(memory, size, two);
        for (int64_t i, end; queue.take(i, end);) {
            for (; i < end; ++i) {
                const int64_t n = least(size, all - i * size);
                compute<T>(c, i * size, n, room);
                store_floats(c, room.row, n, c.result, i * size);
            }
        }
    });
    return result;
}

// ---- codes

// Like compute; if floats are requested too, stores them, and quantizes the stored values.
template <class T>
static void compute_rounded(const RowsCall& c, int64_t at, int64_t n, RowRoom& room) {
    compute<T>(c, at, n, room);
    if (c.r.floats) store_floats(c, room.row, n, c.r.floats, at, true);
}

// Encodes the pieces of a row, or one of them, with elements y.
struct Encoding {
    const RowsCall& c;
    const Pieces& pieces;
    const Factors* given;  // of all blocks, or nullptr
    const TwoLevel* outer;

    void operator()(const Piece& p, const float* y, Room& room) const {
        const QuantizeCall& q = c.q;
        const int64_t per_byte = codes_per_byte(q.q), row_bytes = divide_up(c.r.blocks.cols, per_byte);
        const hop_blocks row{1, 1, p.cols, 1, c.r.blocks.tile_cols, p.cols};
        uint8_t* codes = q.codes + p.row * row_bytes + p.col / per_byte;
        const QuantizeCall one{q.q, row, y, nullptr, false, nullptr, nullptr, 0, codes, q.scale, q.second, 1, false};
        const Strip strip{0, 1, 0, p.cols, p.first, p.count};
        if (!given) return quantize_f32(one, strip, outer, room);
        const Factors own{given->divides, given->by + p.first, given->zero ? given->zero + p.first : nullptr};
        encode_f32(one, strip, Unit{0, 1, 0, p.cols}, own, false);
    }
    // Encodes a row of blocks; with outer_rows, it has a global_amax.
    void by_row(int64_t row, const float* y, Room& room) const {
        const bool own = c.q.q.rule == HOP_TWO_LEVEL && c.q.q.outer_rows;
        TwoLevel of_row;
        if (own) {
            bool known = true;
            const auto* words = reinterpret_cast<const uint32_t*>(y);
            const auto* amax = static_cast<const float*>(c.q.given_scale);
            float& most = static_cast<float*>(c.q.second)[row];
            most = amax ? amax[row] : amax_of<F32>(words, c.r.blocks.cols, known);
            of_row = two_level(c.q.q, most);
        }
        const Encoding encode{c, pieces, given, own ? &of_row : outer};
        for (int64_t j = 0; j < pieces.per_row; ++j) {
            const Piece p = pieces.at(row, j);
            if (p.cols) encode(p, y + p.col, room);
        }
    }
};

template <class T>
static int compute_codes(const RowsCall& c, const Pieces& pieces, const Encoding& encode) {
    const hop_blocks& g = c.r.blocks;
    const bool whole = c.sums() || (c.q.q.rule == HOP_TWO_LEVEL && c.q.q.outer_rows), two = c.r.operation == HOP_LOG_SOFTMAX;
    const int64_t per_item = c.sums() ? c.r.length / g.cols : 1;  // rows of blocks
    const int64_t items = whole ? pieces.rows() / per_item : pieces.rows() * pieces.per_row;
    const int64_t size = whole ? per_item * g.cols : pieces.most();
    const int threads = worth(c.threads, g.batch * g.rows * g.cols, kLarge / 8);
    std::atomic<int> result{HOP_OK};
    Queue queue(items, grain_of(items, size, threads));
    parallel(threads, [&](int, int) {
        char* memory = scratch(RowRoom::bytes(size, two) + Room::bytes(pieces.width));
        if (!memory) {
            result = HOP_NO_MEMORY;
            return;
        }
        RowRoom own(memory, size, two);
        Room room(own.rest, pieces.width, c.q.q.affine);
        for (int64_t i, end; queue.take(i, end);) {
            for (; i < end; ++i) {
                if (whole) {
                    compute_rounded<T>(c, i * size, size, own);
                    for (int64_t k = 0; k < per_item; ++k) encode.by_row(i * per_item + k, own.row + k * g.cols, room);
                    continue;
                }
                const Piece p = pieces.at(i / pieces.per_row, i % pieces.per_row);
                if (!p.cols || function_piece<T>(c, p, encode.given, room)) continue;
                compute_rounded<T>(c, p.row * g.cols + p.col, p.cols, own);
                encode(p, own.row, room);
            }
        }
    });
    return result;
}

template <class T>
static int compute_all(const RowsCall& c) {
    if (!c.r.quantizer) return compute_floats<T>(c);
    const QuantizeCall& q = c.q;
    const bool two_levels = q.q.rule == HOP_TWO_LEVEL, given = q.given_scale && !two_levels;
    const Pieces pieces(c.r.blocks, given);
    TwoLevel outer;
    if (two_levels && !q.q.outer_rows) {
        if (!q.given_scale) return HOP_UNSUPPORTED;
        outer = two_level(q.q, *static_cast<float*>(q.second) = *static_cast<const float*>(q.given_scale));
    }
    if (!given) return compute_codes<T>(c, pieces, Encoding{c, pieces, nullptr, &outer});
    const int64_t blocks = pieces.across * divide_up(c.r.blocks.rows, c.r.blocks.tile_rows) * c.r.blocks.batch;
    const std::unique_ptr<float[]> by(new (std::nothrow) float[size_t(blocks)]);
    const std::unique_ptr<uint8_t[]> zero(new (std::nothrow) uint8_t[size_t(blocks)]);
    if (!by || !zero) return HOP_NO_MEMORY;
    Factors factors{true, by.get(), q.q.affine ? zero.get() : nullptr};
    take_scales(q, 0, blocks, factors);
    return compute_codes<T>(c, pieces, Encoding{c, pieces, &factors, nullptr});
}

template <class T>
HOP_INLINE void widen_all(const void* x, int64_t n, float* y) { widen_row<T>(static_cast<const typename T::Word*>(x), n, y); }

static void widen_any(int32_t dtype, const void* x, int64_t n, float* y) {
    if (dtype == HOP_F32) widen_all<F32>(x, n, y);
    else if (dtype == HOP_BF16) widen_all<BF16>(x, n, y);
    else widen_all<F16>(x, n, y);
}
