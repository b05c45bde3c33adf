// Quantizes a strip of a tensor in one thread. Included in a namespace (isa.h).

// Encodes at most kColumns elements of a row; `at` is the index of the first in the tensor.
static void encode_line(const QuantizeCall& c, const Encoder& encoder, const uint32_t* x, int64_t at, int64_t n, const Factors& f,
                        bool known, const Columns* columns, uint8_t* out) {
    const hop_quantizer& q = c.q;
    const int64_t size = c.blocks.tile_cols;
    uint8_t held[kColumns];
    const bool packs = codes_per_byte(q) > 1;
    uint8_t* codes = packs ? held : out;
    if (c.noise && c.noise_bits == 24) {
        encoder.with<F32>(x, n, size, f, known, static_cast<const uint32_t*>(c.noise) + at, codes);
    } else if (c.noise) {
        encoder.with<F32>(x, n, size, f, known, static_cast<const uint8_t*>(c.noise) + at, codes);
    } else if (size == 1) {
        encoder.columns<F32>(x, n, f, columns, codes);
    } else {
        for (int64_t done = 0, i = 0; done < n; done += size, ++i)
            encoder.run<F32>(x + done, least(size, n - done), encoder.run_of(f, i, known), codes + done);
    }
    if (packs) pack(held, n, q.bits, out);
}

static void encode_unit(const QuantizeCall& c, const Loops& loops, const Strip& strip, const Unit& u, const Factors& f, bool known) {
    const hop_quantizer& q = c.q;
    const hop_blocks& g = c.blocks;
    const Encoder encoder(q);
    const int32_t per_byte = codes_per_byte(q);
    const int64_t row_bytes = divide_up(g.cols, per_byte), size = g.tile_cols;
    const bool fetches = g.batch * g.rows * g.cols > kColumns, in_blocks = !c.noise && size > 1, widens = loops.bytes != 4;
    alignas(64) float line[kColumns];
    Columns columns;
    if (size == 1 && !c.noise && q.format == HOP_INTEGER) columns.set(q, f, u.cols);
    for (int64_t r = 0; r < u.rows; ++r) {
        const int64_t row = strip.row + u.row + r;
        for (int64_t done = 0; done < u.cols; done += kColumns) {
            const int64_t n = least(kColumns, u.cols - done), col = strip.col + u.col + done;
            const void* x = static_cast<const char*>(c.x) + (row * g.row_stride + col) * loops.bytes;
            uint8_t* out = c.codes + row * row_bytes + col / per_byte;
            if (in_blocks && loops.encode && loops.encode(q, encoder.f, x, n, size, f, known, fetches, out)) continue;
            if (widens) loops.widen(x, n, nullptr, line);
            const auto* words = widens ? reinterpret_cast<const uint32_t*>(line) : static_cast<const uint32_t*>(x);
            if (widens && in_blocks && encode_quickly<F32>(q, encoder.f, words, n, size, f, known, false, out)) continue;
            encode_line(c, encoder, words, row * g.cols + col, n, f, known, &columns, out);
        }
    }
}

HOP_INLINE bool measures(const QuantizeCall& c) { return !c.given_scale ? true : c.q.rule == HOP_TWO_LEVEL; }

static void find_factors(const QuantizeCall& c, const Loops& loops, const Strip& s, const TwoLevel* outer, Room& room) {
    if (measures(c)) {
        if (!room.stats.known) loops.mark_nan(c, s, room.stats.high);
        find_scales(c, loops.largest, room.stats, s.first, s.count, outer, room.factors);
    } else {
        take_scales(c, s.first, s.count, room.factors);
    }
    if (c.given_scale) room.stats.known = false;
}

// Quantizes a strip in one thread.
static void quantize_strip(const QuantizeCall& c, const Loops& loops, const Strip& s, const TwoLevel* outer, Room& room) {
    if (measures(c)) {
        const Units units(s);
        const int64_t count = units.size();
        room.stats.clear(s.count, c.q.rule);
        if (count == 1) loops.measure(c, s, units[0], room.stats);
        for (int64_t i = 0; count > 1 && i < count; ++i) {
            room.part.clear(s.count, c.q.rule);
            loops.measure(c, s, units[i], room.part);
            merge(room.part, s.count, c.q.rule, room.stats);
        }
    }
    find_factors(c, loops, s, outer, room);
    encode_unit(c, loops, s, Unit{0, s.rows, 0, s.cols}, room.factors, room.stats.known);
}
