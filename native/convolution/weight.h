// The weight of a convolution. Included in a namespace (isa.h).

// The offset of a kernel element from the first.
inline int64_t tap_offset(const Convolution& c, int64_t tap) {
    const int64_t *strides = c.c.weight_strides, *kernel = c.c.kernel, of_line = kernel[1] * kernel[2];
    return tap / of_line * strides[2] + tap / kernel[2] % kernel[1] * strides[3] + tap % kernel[2] * strides[4];
}

// Reads the codes of one output at one kernel element, from a given channel of its group on.
inline void weight_codes(const Convolution& c, int64_t output, int64_t tap, int64_t channel, int64_t count,
                         int8_t* out) {
    const hop_operand& o = c.job.p.rhs;
    const auto* codes = static_cast<const uint8_t*>(c.job.rhs.codes);
    if (o.layout == HOP_TILED) {
        const int64_t channels = c.c.channels / c.c.groups, of_panel = ceil_div(c.taps * channels, kSlice);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t k = tap * channels + channel + i, quad = k % kSlice / 4;
            const int64_t tile = (output / kBlock * of_panel + k / kSlice) * 2 + output / kRows % 2;
            if (!is_narrow(o.format)) {
                out[i] = static_cast<int8_t>(codes[tile * kTile + (quad * kRows + output % kRows) * 4 + k % 4]);
            } else {
                const uint8_t both = codes[tile * (kTile / 2) + (quad / 2 * kRows + output % kRows) * 4 + k % 4];
                out[i] = static_cast<int8_t>(((quad % 2 ? both >> 4 : both & 15) ^ 8) - 8);
            }
        }
        return;
    }
    const int64_t* strides = c.c.weight_strides;
    const uint8_t* in = codes + output * strides[0] + channel * strides[1] + tap_offset(c, tap);
    if (strides[1] == 1) {
        std::memcpy(out, in, static_cast<size_t>(count));
        return;
    }
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int8_t>(in[i * strides[1]]);
}

// Whether the weight is strided without merged groups, and each slice has one kernel element.
inline bool is_plain(const Convolution& c) {
    return c.units == 1 && c.merged == 1 && c.job.p.rhs.layout == HOP_STRIDED && c.inputs % kSlice == 0;
}

// Whether kernel elements are adjacent.
inline bool is_by_taps(const Convolution& c) {
    const int64_t *strides = c.c.weight_strides, *kernel = c.c.kernel;
    const int64_t dense[3] = {kernel[1] * kernel[2], kernel[2], 1};
    for (int i = 0; i < 3; ++i)
        if (kernel[i] > 1 && strides[2 + i] != dense[i]) return false;
    return is_plain(c) && c.taps > 1 && strides[1] == c.taps;
}

// Writes half of the tiles of a panel for 64 channels, at all kernel elements, which are adjacent.
inline void weight_by_taps(const Convolution& c, int64_t panel, int half, int64_t channels, uint8_t* tiles) {
    const int64_t first = panel * kBlock + half * kRows, *strides = c.c.weight_strides, each = c.inputs / kSlice;
    const int64_t rows = c.outputs - first < kRows ? c.outputs - first : kRows;
    alignas(64) uint8_t block[kSide * kTile];
    if (rows < kRows) std::memset(block, 0, sizeof(block));
    tiles += ((panel * c.slices + channels) * 2 + half) * kTile;
    for (int64_t from = 0; from < c.taps; from += kSide) {
        const int64_t count = c.taps - from < kSide ? c.taps - from : kSide;
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t i = 0; i < kSlice; i += kSide) {
                const int64_t channel = channels * kSlice + i;
                const bool last = first + row + 1 == c.outputs && channel + kSide == c.inputs;  // stay inside the
                                                                                                // weight
                transpose_square(static_cast<const uint8_t*>(c.job.rhs.codes) + (first + row) * strides[0] +
                                     channel * c.taps + from,
                                 c.taps, block + row * kSlice + i, kTile, last ? count : kSide);
            }
        for (int64_t tap = 0; tap < count; ++tap)
            tile_from_rows(block + tap * kTile, kSlice, tiles + (from + tap) * each * 2 * kTile);
    }
}

// Writes one int8 tile of a panel. Panels are numbered across all units.
inline void weight_tile(const Convolution& c, int64_t panel, int half, int64_t slice, uint8_t* tile) {
    const hop_operand& o = c.job.p.rhs;
    const int64_t unit = panel / c.panels, first = panel % c.panels * kBlock + half * kRows;
    if (c.units == 1 && c.merged == 1 && o.layout == HOP_TILED) {
        const uint8_t* codes = tile_of_codes(o, c.job.rhs.codes, c.outputs, c.job.p.k, first, slice, tile);
        for (int i = 0; i < kTile; i += 64) to_int8(o.format, codes + i, tile + i);
        return;
    }
    const int64_t output_stride = c.c.weight_strides[0];
    if (is_plain(c) && c.c.weight_strides[1] == 1 && first + kRows <= c.outputs) {
        const int64_t each = c.inputs / kSlice;
        const auto* codes = static_cast<const uint8_t*>(c.job.rhs.codes) + first * output_stride;
        return tile_from_rows(codes + tap_offset(c, slice / each) + slice % each * kSlice, output_stride, tile);
    }
    const int64_t channels = c.c.channels / c.c.groups, of_group = c.c.outputs / c.c.groups;
    const int64_t begin = slice * kSlice, all = c.taps * c.inputs, end = begin + kSlice < all ? begin + kSlice : all;
    uint8_t block[kTile] = {};
    for (int64_t row = 0; row < kRows && first + row < c.outputs; ++row) {
        const int64_t own = (first + row) / of_group * channels;  // the first channel of its group in the unit
        for (int64_t k = begin; k < end;) {
            const int64_t tap = k / c.inputs, channel = k % c.inputs;
            const int64_t last = channel + end - k < c.inputs ? channel + end - k : c.inputs;
            const int64_t from = channel > own ? channel : own, to = last < own + channels ? last : own + channels;
            if (from < to)
                weight_codes(c, unit * c.outputs + first + row, tap, from - own, to - from,
                             reinterpret_cast<int8_t*>(block + row * kSlice + (k - begin) + (from - channel)));
            k += last - channel;
        }
    }
    tile_from_rows(block, kSlice, tile);
}
