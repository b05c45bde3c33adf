// The right factor, from its codes to tiles. Included in a namespace (isa.h).

// The tile of codes of rows first..first + 15 in a slice; a pointer to where it is, `buffer` if it had to be made.
inline const uint8_t* tile_of_codes(
    const hop_operand& o, const void* data, int64_t rows, int64_t size, int64_t first, int64_t slice, uint8_t* buffer) {
    const auto* base = static_cast<const uint8_t*>(data);
    if (o.layout == HOP_TILED) {
        const int64_t tile = (first / kBlock * ceil_div(size, kSlice) + slice) * 2 + first / kRows % 2;
        if (!is_narrow(o.format)) return base + tile * kTile;
        widen_tile(base + tile * (kTile / 2), buffer);
        return buffer;
    }
    const int64_t k = slice * kSlice;
    const int count = static_cast<int>(size - k < kSlice ? size - k : kSlice);
    const int inside = static_cast<int>(rows - first < kRows ? rows - first : kRows);
    if (inside <= 0) {
        std::memset(buffer, 0, kTile);
        return buffer;
    }
    if (!is_narrow(o.format) && count == kSlice && inside == kRows) {
        const uint8_t* src = base + first * o.row_stride + k * o.k_stride;
        if (o.k_stride == 1) return tile_from_rows(src, o.row_stride, buffer), buffer;
        if (o.row_stride == 1) return tile_from_columns(src, o.k_stride, buffer), buffer;
    }
    uint8_t block[kTile] = {};
    for (int i = 0; i < inside; ++i) {
        uint8_t* own = block + i * kSlice;
        const uint8_t* codes = codes_of_row(o, data, first + i, k, count, own);
        if (codes != own) std::memcpy(own, codes, kSlice);
    }
    tile_from_rows(block, kSlice, buffer);
    return buffer;
}

// The fold of 16 rows at one k; 0 for rows that are none.
inline void fold_of_rows(const Job& job, int64_t first, int64_t k, float* fold) {
    const hop_scale& s = job.p.rhs.fold;
    const int64_t rest = job.p.n - first, count = k >= job.p.k || rest < 0 ? 0 : rest < kRows ? rest : kRows;
    const int64_t of_k = k / s.ks * s.k_stride;
    for (int64_t i = count; i < kRows; ++i) fold[i] = 0.f;
    if (s.rows == 1 && s.format != HOP_FLOAT32) {
        const float* table = scale_table(s.format);
        const uint8_t* codes = static_cast<const uint8_t*>(job.rhs.fold) + first * s.row_stride + of_k;
        for (int64_t i = 0; i < count; ++i) fold[i] = table[codes[i * s.row_stride]];
    } else if (s.row_stride == 0 || s.rows >= kBlock) {  // blocks of so many rows have all of a tile's, or two have
        const int64_t edge = s.row_stride == 0 ? count : s.rows - first % s.rows;
        for (int64_t i = 0; i < count; i = i < edge ? edge : count) {
            const float f = scale_value(s.format, job.rhs.fold, (first + i) / s.rows * s.row_stride + of_k);
            for (int64_t row = i; row < count && (i >= edge || row < edge); ++row) fold[row] = f;
        }
    } else {
        for (int64_t i = 0; i < count; ++i)
            fold[i] = scale_value(s.format, job.rhs.fold, (first + i) / s.rows * s.row_stride + of_k);
    }
}

// One tile as bfloat16 numbers, 2 * kTile bytes.
inline void tile_of_words(const Job& job, const Words& words, int64_t first, int64_t slice, uint8_t* out) {
    const hop_operand& o = job.p.rhs;
    uint8_t buffer[kTile], zero[kRows];
    const uint8_t* codes = tile_of_codes(o, job.rhs.codes, job.p.n, job.p.k, first, slice, buffer);
    auto *even = reinterpret_cast<uint16_t*>(out), *odd = even + kTile / 2;
    const bool zeros = o.format == HOP_UINT4 && has_zero(o), folds = o.fold.format != HOP_NONE;
    float fold[kRows];
    const auto left = [](int64_t k, int64_t ks) {  // quads from k to the end of its block
        const int64_t rest = (ks - k % ks) / 4;
        return rest < kQuads ? static_cast<int>(rest) : kQuads;
    };
    for (int quad = 0, next; quad < kQuads; quad = next) {
        const int64_t k = slice * kSlice + quad * 4;
        next = kQuads;
        if (folds) {
            fold_of_rows(job, first, k, fold);
            const int end = quad + left(k, o.fold.ks);
            next = end < next ? end : next;
        }
        if (zeros) {
            for (int i = 0; i < kRows; ++i)
                zero[i] = first + i < job.p.n && k < job.p.k ? static_cast<uint8_t>(zero_of(o, job.rhs, first + i, k)) : 0;
            const int end = quad + left(k, o.scale.ks);
            next = end < next ? end : next;
        }
        words.decode(codes + quad * 64, next - quad, zeros ? zero : nullptr, folds ? fold : nullptr, even + quad * 32, odd + quad * 32);
    }
}

// The scales, zero points and sums of the columns of a block in one group, from its tiles of int8.
inline void side_of_columns(const Job& job, int64_t first, int64_t group, Side& side) {
    const int64_t k = group * job.group;
    const bool integers = by_integers(job.p);
    const int64_t rest = job.p.n - first, count = k > 0 && k >= job.p.k ? 0 : rest < kBlock ? rest : kBlock;
    std::memset(&side, 0, sizeof(side));
    if (count == 0) return;
    load_scales(job.p.rhs.scale, job.rhs.scale, first, count, k, side.scale);
    if (integers && has_zero(job.p.rhs))
        for (int i = 0; i < count; ++i) side.zero[i] = zero_of(job.p.rhs, job.rhs, first + i, k);
}
