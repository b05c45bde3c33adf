// A strip of a tensor by one thread. Included in a namespace (isa.h).

template <class T>
static void encode_unit(const QuantizeCall& c, const Strip& strip, const Unit& u, const Factors& f, bool known) {
    const hop_quantizer& q = c.q;
    const hop_blocks& g = c.blocks;
    const Encoder encoder(q);
    const int32_t per_byte = codes_per_byte(q);
    const int64_t row_bytes = divide_up(g.cols, per_byte), size = g.tile_cols;
    const auto* x = static_cast<const typename T::Word*>(c.x);
    uint8_t held[kColumns];
    const bool fetches = g.batch * g.rows * g.cols > kColumns;
    Columns columns;
    if (size == 1 && q.format == HOP_INTEGER) columns.set(q, f, u.cols);
    for (int64_t r = 0; r < u.rows; ++r) {
        const int64_t row = strip.row + u.row + r;
        for (int64_t done = 0; done < u.cols; done += kColumns) {
            const int64_t n = least(kColumns, u.cols - done), col = strip.col + u.col + done;
            const auto* words = x + row * g.row_stride + col;
            uint8_t* out = c.codes + row * row_bytes + col / per_byte;
            uint8_t* codes = per_byte > 1 ? held : out;
            if (c.noise && c.noise_bits == 24) {
                const auto* noise = static_cast<const uint32_t*>(c.noise) + row * g.cols + col;
                encoder.with<T>(words, n, size, f, known, noise, codes);
            } else if (c.noise) {
                const auto* noise = static_cast<const uint8_t*>(c.noise) + row * g.cols + col;
                encoder.with<T>(words, n, size, f, known, noise, codes);
            } else if (size == 1) {
                encoder.columns<T>(words, n, f, &columns, codes);
            } else if (encode_quickly<T>(q, encoder.f, words, n, size, f, known, fetches, out)) {
                continue;
            } else {
                for (int64_t at = 0, i = 0; at < n; at += size, ++i)
                    encoder.run<T>(words + at, least(size, n - at), encoder.run_of(f, i, known), codes + at);
            }
            if (per_byte > 1) pack(held, n, q.bits, out);
        }
    }
}

HOP_INLINE bool measures(const QuantizeCall& c) { return !c.given_scale ? true : c.q.rule == HOP_TWO_LEVEL; }

// NaN for the amax of each block whose scale is NaN: of one with a NaN, unless its codes keep that, and, by rules whose
// scale is a float, of one with an infinity.
template <class T>
static void mark_nan(const QuantizeCall& c, const Strip& s, float* high) {
    const hop_quantizer& q = c.q;
    const hop_blocks& g = c.blocks;
    const bool of_nan = !q.keeps_nan || (q.rule == HOP_MICROSCALING && q.rounding != HOP_MX_RCEIL);
    const bool of_infinity = q.rule == HOP_AMAX || q.rule == HOP_MINMAX || q.rule == HOP_CURRENT_SCALING;
    if (c.of_state || q.rule == HOP_ABSMEAN) return;
    const auto* x = static_cast<const typename T::Word*>(c.x);
    for (int64_t r = 0; r < s.rows; ++r) {
        const auto* row = x + (s.row + r) * g.row_stride + s.col;
        for (int64_t i = 0; i < s.cols; ++i) {
            const typename T::Word m = row[i] & T::magnitude;
            if (m > T::infinity ? of_nan : m == T::infinity && of_infinity) high[i / g.tile_cols] = float_of(0x7fc00000);
        }
    }
}

template <class T>
static void find_factors(const QuantizeCall& c, const Strip& s, const TwoLevel* outer, Room& room) {
    if (measures(c)) {
        if (!room.stats.known) mark_nan<T>(c, s, room.stats.high);
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
            merge(room.part, s.count, c.q.rule, room.stats);
        }
    }
    find_factors<T>(c, s, outer, room);
    encode_unit<T>(c, s, Unit{0, s.rows, 0, s.cols}, room.factors, room.stats.known);
}
