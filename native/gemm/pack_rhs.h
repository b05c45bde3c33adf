// Packs rhs, from codes to tiles. Included in a namespace (isa.h).

// The tile of rows first..first + 15 in a slice of a tiled operand with `size` k.
inline const uint8_t* tile_in_panel(const hop_operand& o, const void* data, int64_t size, int64_t first, int64_t slice) {
    const int64_t tile = (first / kBlock * ceil_div(size, kSlice) + slice) * 2 + first / kRows % 2;
    return static_cast<const uint8_t*>(data) + tile * (is_narrow(o.format) ? kTile / 2 : kTile);
}

// Returns the tile of codes of rows first..first + 15 in a slice: in place if possible, else in `buffer`.
inline const uint8_t* tile_of_codes(
    const hop_operand& o, const void* data, int64_t rows, int64_t size, int64_t first, int64_t slice, uint8_t* buffer) {
    const auto* base = static_cast<const uint8_t*>(data);
    if (o.layout == HOP_TILED) {
        const uint8_t* tile = tile_in_panel(o, data, size, first, slice);
        if (!is_narrow(o.format)) return tile;
        widen_tile(tile, 0, buffer);
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

// Calls body(quad, k) for each quad of a slice at which a block of `ks` begins, or k ends.
template <class Body>
inline void for_blocks_of_slice(int64_t slice, int64_t ks, int64_t size, Body body) {
    const int64_t begin = slice * kSlice;
    for (int64_t k = begin, end; k < begin + kSlice; k = end) {
        body(static_cast<int>(k - begin) / 4, k);
        end = k >= size || ks >= size ? begin + kSlice : (k / ks + 1) * ks;
        if (k < size && end > size) end = (size + 3) / 4 * 4;  // the padding is a separate block
    }
}

// Calls body(zero, fold) with the zero points and block scales of the quads of a tile of rows first..first + 15, for
// float engines.
template <class Body>
inline void with_quads(const Job& job, BlockScales& folds, int64_t first, int64_t slice, Body body) {
    const hop_operand& o = job.p.rhs;
    alignas(64) float own_fold[kQuads][kRows];
    alignas(16) uint8_t own_zero[kQuads][kRows];
    PerQuads<float> fold;
    PerQuads<uint8_t> zero;
    const bool whole = (slice + 1) * kSlice <= job.p.k;
    if (o.fold.format != HOP_NONE) {
        const int64_t ks = o.fold.ks, panel = first / kBlock * kBlock;
        if (whole && (ks % kSlice == 0 || kSlice % ks == 0)) {  // use them in place
            fold = {folds.at(panel, slice * kSlice) + first % kBlock, ks < kSlice ? static_cast<int>(ks / 4) : kQuads, kBlock};
        } else {
            fold = {own_fold[0], 1, kRows};
            for_blocks_of_slice(slice, ks, job.p.k, [&](int quad, int64_t k) {
                for (int i = quad; i < kQuads; ++i) {
                    if (k < job.p.k) std::memcpy(own_fold[i], folds.at(panel, k) + first % kBlock, sizeof(own_fold[i]));
                    else std::memset(own_fold[i], 0, sizeof(own_fold[i]));
                }
            });
        }
    }
    if (o.format == HOP_UINT4 && has_zero(o)) {
        zero = {own_zero[0], 1, kRows};
        const int64_t rest = job.p.n - first, inside = rest < 0 ? 0 : rest < kRows ? rest : kRows;
        for_blocks_of_slice(slice, o.scale.ks, job.p.k, [&](int quad, int64_t k) {
            const int64_t count = k < job.p.k ? inside : 0;
            if (o.zero_format == HOP_UINT8 && o.scale.rows == 1) {
                const uint8_t* zeros = static_cast<const uint8_t*>(job.rhs.zero) + first * o.scale.row_stride + k / o.scale.ks * o.scale.k_stride;
                for (int i = 0; i < kRows; ++i) own_zero[quad][i] = i < count ? zeros[i * o.scale.row_stride] : 0;
            } else {
                int32_t numbers[kRows] = {};
                load_zeros(o, job.rhs.zero, first, count, k, numbers);
                for (int i = 0; i < kRows; ++i) own_zero[quad][i] = i < count ? static_cast<uint8_t>(numbers[i]) : 0;
            }
            for (int i = quad + 1; i < kQuads; ++i) std::memcpy(own_zero[i], own_zero[quad], kRows);
        });
    }
    body(zero, fold);
}

// Decodes one tile to bfloat16, 2 * kTile bytes.
template <class Decoding>
inline void tile_of_words(const Job& job, const Decoding& words, BlockScales& folds, int64_t first, int64_t slice, uint8_t* out) {
    const hop_operand& o = job.p.rhs;
    auto *even = reinterpret_cast<uint16_t*>(out), *odd = even + kTile / 2;
    with_quads(job, folds, first, slice, [&](const PerQuads<uint8_t>& zero, const PerQuads<float>& fold) {
        if constexpr (Decoding::kPacked) {
            if (o.layout == HOP_TILED && is_narrow(o.format))
                return words.template decode<true>(tile_in_panel(o, job.rhs.codes, job.p.k, first, slice), kQuads, zero, fold, even, odd);
        }
        uint8_t buffer[kTile];
        const uint8_t* codes = tile_of_codes(o, job.rhs.codes, job.p.n, job.p.k, first, slice, buffer);
        words.decode(codes, kQuads, zero, fold, even, odd);
    });
}

// Whether the caller passed sums of the columns' codes. They run over all k, so they do not serve groups.
inline bool knows_sums(const Job& job) { return job.rhs.sums && !job.grouped(); }

// Loads scales and zero points of the columns of a block in one group. Unknown code sums start at 0.
inline void side_of_columns(const Job& job, BlockScales& scales, int64_t first, int64_t group, Side& side) {
    const int64_t k = group * job.group, rest = job.p.n - first;
    std::memset(side.zero, 0, sizeof(side.zero));
    std::memset(side.sum, 0, sizeof(side.sum));
    if (knows_sums(job)) {
        const auto shift = static_cast<uint32_t>(job.p.rhs.format == HOP_UINT8 ? 128 * job.p.k : -job.rhs_shift * job.p.k);
        for (int64_t i = 0; i < kBlock && i < rest; ++i)
            side.sum[i] = static_cast<int32_t>(static_cast<uint32_t>(job.rhs.sums[first + i]) - shift);
    }
    std::memcpy(side.scale, scales.at(first, k), sizeof(side.scale));
    if (!by_integers(job.p)) return;
    if (has_zero(job.p.rhs)) load_zeros(job.p.rhs, job.rhs.zero, first, rest < kBlock ? rest : kBlock, k, side.zero);
    for (int i = 0; job.rhs_shift && i < kBlock; ++i) side.zero[i] += job.rhs_shift;
}
