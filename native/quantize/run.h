// A tensor, strip by strip. Included in a namespace (isa.h).

template <class T>
static void encode_unit(const QuantizeCall& c, const Strip& strip, const Unit& u, const Factors& f, bool known) {
    const hop_quantizer& q = c.q;
    const hop_blocks& g = c.blocks;
    const Encoder encoder(q);
    const int32_t per_byte = codes_per_byte(q);
    const int64_t row_bytes = divide_up(g.cols, per_byte), size = g.tile_cols;
    const auto* x = static_cast<const typename T::Word*>(c.x);
    uint8_t held[kColumns];
    Columns columns;
    if (size == 1 && q.format == HOP_INTEGER) columns.set(q, f, u.cols);
    for (int64_t r = 0; r < u.rows; ++r) {
        const int64_t row = strip.row + u.row + r;
        for (int64_t done = 0; done < u.cols; done += kColumns) {
            const int64_t n = least(kColumns, u.cols - done), col = strip.col + u.col + done;
            const auto* words = x + row * g.row_stride + col;
            const uint8_t* noise = c.noise ? c.noise + row * g.cols + col : nullptr;
            uint8_t* out = c.codes + row * row_bytes + col / per_byte;
            uint8_t* codes = per_byte > 1 ? held : out;
            if (size > 1 && !noise && encode_quickly<T>(q, encoder.f, words, n, size, f, known, out)) continue;
            if (size > 1 && noise && encode_with_noise<T>(q, words, n, size, f, known, noise, codes)) {
            } else if (size == 1) {
                encoder.columns<T>(words, n, f, &columns, noise, codes);
            } else if (noise && q.format == HOP_FLOAT) {
                encoder.with<T>(words, n, size, f, noise, codes);
            } else {
                for (int64_t at = 0, i = 0; at < n; at += size, ++i) {
                    const Run run{f.by[i], f.divides, known, f.zero ? code_of_zero(q, f.zero[i]) : q.zero};
                    encoder.run<T>(words + at, least(size, n - at), run, noise ? noise + at : nullptr, codes + at);
                }
            }
            if (per_byte > 1) pack(held, n, q.bits, out);
        }
    }
}

// What is known of a strip's blocks, and what follows.
struct Room {
    Stats stats, part;
    Factors factors;

    static size_t bytes(int64_t blocks) { return size_t(padded(blocks)) * 53; }
    static int64_t padded(int64_t blocks) { return divide_up(blocks, 16) * 16; }
    Room(char* memory, int64_t blocks, bool affine) {
        const int64_t n = padded(blocks);
        stats = Stats::at(memory, n);
        part = Stats::at(memory + 24 * n, n);
        factors.by = reinterpret_cast<float*>(memory + 48 * n);
        factors.zero = affine ? reinterpret_cast<uint8_t*>(memory + 52 * n) : nullptr;
        factors.divides = true;
    }
};

HOP_INLINE bool measures(const QuantizeCall& c) { return !c.given_scale ? true : c.q.rule == HOP_TWO_LEVEL; }

// Whether a NaN is all that a block's scale shall be.
HOP_INLINE bool keeps_nan_of_blocks(const hop_quantizer& q) { return q.rule == HOP_MICROSCALING && q.rounding != HOP_MX_RCEIL; }

// NaN for the amax of each block of a strip that has one.
template <class T>
static void mark_nan(const QuantizeCall& c, const Strip& s, float* high) {
    const hop_blocks& g = c.blocks;
    const auto* x = static_cast<const typename T::Word*>(c.x);
    for (int64_t r = 0; r < s.rows; ++r) {
        const auto* row = x + (s.row + r) * g.row_stride + s.col;
        for (int64_t i = 0; i < s.cols; ++i) {
            const float v = T::widen(row[i]);
            if (v != v) high[i / g.tile_cols] = v;
        }
    }
}

template <class T>
static void find_factors(const QuantizeCall& c, const Strip& s, const TwoLevel* outer, Room& room) {
    if (measures(c)) {
        if (keeps_nan_of_blocks(c.q) && !room.stats.known) mark_nan<T>(c, s, room.stats.high);
        find_scales<T>(c, room.stats, s.first, s.count, outer, room.factors);
    } else {
        take_scales(c, s.first, s.count, room.factors);
    }
    if (c.given_scale) room.stats.known = false;
}

// A strip by one thread.
template <class T>
static void quantize_strip(const QuantizeCall& c, const Strip& s, const TwoLevel* outer, Room& room) {
    if (measures(c)) {
        const Units units(s);
        const int64_t count = units.size();
        room.stats.clear(s.count, c.q.rule);
        if (count == 1) measure<T>(c, s, units[0], room.stats);
        for (int64_t i = 0; count > 1 && i < count; ++i) {
            room.part.clear(s.count, c.q.rule);
            measure<T>(c, s, units[i], room.part);
            room.stats.merge(room.part, s.count, c.q.rule);
        }
    }
    find_factors<T>(c, s, outer, room);
    encode_unit<T>(c, s, Unit{0, s.rows, 0, s.cols}, room.factors, room.stats.known);
}

// A strip by several threads.
template <class T>
static int quantize_together(const QuantizeCall& c, const Strip& s, const TwoLevel* outer, int threads) {
    const Units units(s);
    const int64_t count = units.size(), blocks = Room::padded(s.count);
    const size_t each = Stats::bytes(blocks);
    char* memory = scratch(each * size_t(count) + Room::bytes(s.count));
    if (!memory) return HOP_NO_MEMORY;
    Room room(memory + each * size_t(count), s.count, c.q.affine);
    room.stats.clear(s.count, c.q.rule);
    if (measures(c)) {
        std::atomic<bool> known{true};
        Queue queue(count);
        parallel(threads, [&](int, int) {
            for (int64_t i, end; queue.take(i, end);) {
                Stats own = Stats::at(memory + each * size_t(i), blocks);
                own.clear(s.count, c.q.rule);
                measure<T>(c, s, units[i], own);
                if (!own.known) known = false;
            }
        });
        for (int64_t i = 0; i < count; ++i) {
            Stats own = Stats::at(memory + each * size_t(i), blocks);
            own.known = known;
            room.stats.merge(own, s.count, c.q.rule);
        }
    }
    find_factors<T>(c, s, outer, room);
    Queue queue(count);
    parallel(threads, [&](int, int) {
        for (int64_t i, end; queue.take(i, end);) encode_unit<T>(c, s, units[i], room.factors, room.stats.known);
    });
    return HOP_OK;
}

// ---- HOP_TWO_LEVEL

template <class T>
static float amax_of_row(const QuantizeCall& c, int64_t row, int64_t begin, int64_t end) {
    bool known = true;
    const auto* x = static_cast<const typename T::Word*>(c.x) + row * c.blocks.row_stride;
    return amax_of<T>(x + begin, end - begin, known);
}

template <class T>
static float amax_of_tensor(const QuantizeCall& c, int threads) {
    const int64_t per_row = divide_up(c.blocks.cols, kLarge), count = c.blocks.batch * c.blocks.rows * per_row;
    std::atomic<uint32_t> most{0};
    Queue queue(count, grain_of(count, least(c.blocks.cols, kLarge), threads));
    parallel(threads, [&](int, int) {
        float own = 0;
        for (int64_t i, end; queue.take(i, end);) {
            for (; i < end; ++i) {
                const int64_t begin = i % per_row * kLarge;
                const float found = amax_of_row<T>(c, i / per_row, begin, least(begin + kLarge, c.blocks.cols));
                own = found > own ? found : own;
            }
        }
        for (uint32_t seen = most; bits_of(own) > seen && !most.compare_exchange_weak(seen, bits_of(own));) {
        }
    });
    return float_of(most);
}

// ---- all

// Strips by one thread each; `outer` is nullptr where each row has its own.
template <class T>
static int quantize_strips(const QuantizeCall& c, const Strips& strips, const TwoLevel* outer, int threads) {
    const hop_blocks& g = c.blocks;
    const bool by_rows = c.q.rule == HOP_TWO_LEVEL && c.q.outer_rows;
    const int64_t cols = by_rows ? g.cols : least(g.cols, strips.width * g.tile_cols),
                  size = cols * least(g.tile_rows, g.rows);
    std::atomic<int> result{HOP_OK};
    const int64_t items = by_rows ? g.batch * g.rows : strips.size();
    Queue queue(items, grain_of(items, size, threads));
    parallel(threads, [&](int, int) {
        char* memory = scratch(Room::bytes(strips.width));
        if (!memory) {
            result = HOP_NO_MEMORY;
            return;
        }
        Room room(memory, strips.width, c.q.affine);
        for (int64_t i, end; queue.take(i, end);) {
            for (; i < end; ++i) {
                if (!by_rows) {
                    quantize_strip<T>(c, strips[i], outer, room);
                    continue;
                }
                float& amax = static_cast<float*>(c.second)[i];
                amax = c.given_scale ? static_cast<const float*>(c.given_scale)[i] : amax_of_row<T>(c, i, 0, g.cols);
                const TwoLevel own = two_level(c.q, amax);
                for (int64_t j = 0; j < strips.per_row; ++j)
                    quantize_strip<T>(c, strips[i * strips.per_row + j], &own, room);
            }
        }
    });
    return result;
}

template <class T>
static int quantize_tensor(const QuantizeCall& c) {
    const hop_blocks& g = c.blocks;
    const Strips strips(g);
    const int threads = worth(c.threads, g.batch * g.rows * g.cols, kLarge / 2);
    TwoLevel outer;
    if (c.q.rule == HOP_TWO_LEVEL && !c.q.outer_rows) {
        float& amax = *static_cast<float*>(c.second);
        amax = c.given_scale ? *static_cast<const float*>(c.given_scale) : amax_of_tensor<T>(c, threads);
        outer = two_level(c.q, amax);
    } else if (threads > 1 && strips.size() < 4 * threads && Units(strips[0]).size() > 1) {
        for (int64_t i = 0; i < strips.size(); ++i) {
            const int result = quantize_together<T>(c, strips[i], &outer, threads);
            if (result != HOP_OK) return result;
        }
        return HOP_OK;
    }
    return quantize_strips<T>(c, strips, &outer, threads);
}

static int quantize(const QuantizeCall& c, int32_t dtype) {
    switch (dtype) {
        case HOP_F32: return quantize_tensor<F32>(c);
        case HOP_BF16: return quantize_tensor<BF16>(c);
        case HOP_F16: return quantize_tensor<F16>(c);
        default: return HOP_UNSUPPORTED;
    }
}
