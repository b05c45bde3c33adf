// Packs lhs, from codes to tiles. Included in a namespace (isa.h).

inline bool has_zero(const hop_operand& o) { return o.zero_format != HOP_NONE || o.zero != (o.format == HOP_UINT8 ? 128 : 0); }
inline bool rhs_has_zero(const Job& job) { return has_zero(job.p.rhs) || job.rhs_shift != 0; }
inline bool lhs_has_zero(const Job& job) {
    const hop_operand& o = job.p.lhs;
    return o.zero_format != HOP_NONE || o.zero - (o.format == HOP_UINT8 ? 128 : 0) + job.shift != 0;
}

// Returns 64 codes of a row from k on, with zeros after the first `count`.
inline const uint8_t* codes_of_row(const hop_operand& o, const void* codes, int64_t row, int64_t k, int count, uint8_t* buffer) {
    const auto* base = static_cast<const uint8_t*>(codes);
    if (is_narrow(o.format)) {
        uint8_t bytes[32] = {};
        const uint8_t* src = base + (row * o.row_stride + k) / 2;
        if (count < kSlice) {
            std::memcpy(bytes, src, (count + 1) / 2);
            if (count & 1) bytes[count / 2] &= 15;
            src = bytes;
        }
        widen(src, buffer);
        return buffer;
    }
    const uint8_t* src = base + row * o.row_stride + k * o.k_stride;
    if (o.k_stride == 1 && count == kSlice) return src;
    std::memset(buffer, 0, kSlice);
    for (int i = 0; i < count; ++i) buffer[i] = src[i * o.k_stride];
    return buffer;
}

// Converts 64 codes for an int8 engine: adds 128 if the engine shifts, which leaves uint8 unchanged.
inline void to_lhs(int format, bool shifted, const uint8_t* codes, uint8_t* out) {
    if (format == HOP_UINT8 && shifted) {
        std::memcpy(out, codes, kSlice);
        return;
    }
    to_int8(format, codes, out);
    for (int j = 0; shifted && j < kSlice; ++j) out[j] ^= 0x80;
}

// Packs the tiles of rows first..first + rows - 1 (at most 32) of a slice, for an int8 engine.
inline void pack_int8(const Job& job, int64_t first, int rows, int64_t slice, uint8_t* out) {
    const hop_operand& o = job.p.lhs;
    const int64_t k = slice * kSlice;
    const int count = static_cast<int>(job.p.k - k < kSlice ? job.p.k - k : kSlice);
    uint8_t buffer[kSlice];
    for (int i = 0; i < rows; ++i, out += kSlice) {
        to_lhs(o.format, job.shift != 0, codes_of_row(o, job.lhs.codes, first + i, k, count, buffer), out);
        if (count < kSlice) std::memset(out + count, 0, kSlice - count);
    }
}

// The same for a bfloat16 engine.
inline void pack_words(const Job& job, int64_t first, int rows, int64_t slice, uint8_t* out) {
    const hop_operand& o = job.p.lhs;
    const int64_t k = slice * kSlice;
    const int count = static_cast<int>(job.p.k - k < kSlice ? job.p.k - k : kSlice);
    const Words words(o.format);
    uint8_t buffer[2 * kSlice];
    for (int i = 0; i < rows; ++i) {
        auto* even = reinterpret_cast<uint16_t*>(out + i / kRows * 2 * kTile + i % kRows * kSlice);
        auto* odd = even + kTile / 2;
        if (o.format == HOP_BFLOAT16) {
            const auto* src = static_cast<const uint16_t*>(job.lhs.codes) + (first + i) * o.row_stride + k * o.k_stride;
            if (o.k_stride != 1 || count < kSlice) {
                auto* copy = reinterpret_cast<uint16_t*>(buffer);
                for (int j = 0; j < kSlice; ++j) copy[j] = j < count ? src[j * o.k_stride] : 0;
                src = copy;
            }
            split_words(src, even, odd);
            continue;
        }
        const uint8_t* codes = codes_of_row(o, job.lhs.codes, first + i, k, count, buffer);
        if (o.fold.format == HOP_NONE) {
            words.decode(codes, 1, {}, {}, even, odd);
            continue;
        }
        float fold[kQuads];
        const int64_t of_row = (first + i) / o.fold.rows * o.fold.row_stride;
        for (int quad = 0; quad < kQuads;) {
            const int64_t block = (k + quad * 4) / o.fold.ks, end = (block + 1) * o.fold.ks;
            const bool inside = quad * 4 < count;
            const float f = inside ? scale_at(o.fold.format, job.lhs.fold, of_row + block * o.fold.k_stride) : 0.f;
            do fold[quad++] = f;
            while (quad < kQuads && k + quad * 4 < end);
        }
        words.decode(codes, 1, {}, {fold}, even, odd);
    }
}

// Computes scales, zero points and code sums of the rows of a block in one group.
inline void side_of_rows(const Job& job, BlockScales& scales, int64_t first, int rows, int64_t group, bool sums, Side& side) {
    const hop_operand& o = job.p.lhs;
    const int64_t k = group * job.group, end = k + job.group < job.p.k ? k + job.group : job.p.k;
    std::memcpy(side.scale, scales.at(first, k), sizeof(side.scale));
    std::memset(side.zero, 0, sizeof(side.zero));
    std::memset(side.sum, 0, sizeof(side.sum));
    if (!by_integers(job.p)) return;
    load_zeros(o, job.lhs.zero, first, rows, k, side.zero);
    for (int i = 0; i < rows; ++i) {
        side.zero[i] += job.shift;
        if (!sums) continue;
        for (int64_t at = k; at < end; at += kSlice) {
            const int count = static_cast<int>(end - at < kSlice ? end - at : kSlice);
            uint8_t buffer[kSlice], out[kSlice];
            to_int8(o.format, codes_of_row(o, job.lhs.codes, first + i, at, count, buffer), out);
            side.sum[i] += sum_of(reinterpret_cast<const int8_t*>(out), count) + job.shift * count;
        }
    }
    pair_row(side);
}
