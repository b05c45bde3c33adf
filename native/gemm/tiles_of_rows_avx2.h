// Tiles of a factor that is not packed, for few rows with AVX2. Included in a namespace (isa.h), after pack_rhs.h.

// The packed tile of 16 rows of 64 4-bit codes, `stride` bytes apart.
HOP_ALONE inline void narrow_tile_from_rows(const uint8_t* from, int64_t stride, uint8_t* tile) {
    const __m256i low = _mm256_set1_epi32(0xffff), bytes = _mm256_set1_epi32(0x00ff00ff), nibbles = _mm256_set1_epi8(15);
    const auto spread = [&](__m256i x) {  // four codes in 16 bits to one in each byte
        x = _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi32(x, 8)), bytes);
        return _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi32(x, 4)), nibbles);
    };
    turn(from, stride, tile, 64, [&](__m256i x) {
        return _mm256_or_si256(spread(_mm256_and_si256(x, low)), _mm256_slli_epi32(spread(_mm256_srli_epi32(x, 16)), 4));
    }, 8);
}

// The tiles of a panel of rhs, slice by slice: in place if rhs is packed, else built from its codes.
class TilesOfPanel {
public:
    TilesOfPanel(const Job& job, int64_t panel)
        : job_(job), first_(panel * kBlock), bytes_(is_narrow(job.p.rhs.format) ? kTile / 2 : kTile), tiled_(job.p.rhs.layout == HOP_TILED) {}

    // `count` adjacent tiles of a slice from `tile` (0 or 1) on.
    const uint8_t* at(int64_t slice, int tile, int count) {
        if (tiled_) return tile_in_panel(job_.p.rhs, job_.rhs.codes, job_.p.k, first_ + tile * kRows, slice);
        for (int i = 0; i < count; ++i) make(first_ + (tile + i) * kRows, slice, made_ + i * bytes_);
        return made_;
    }

    // Prefetches packed codes ahead of place `quads`, a number of pairs of 64-byte lines, in the slice at `tile`.
    void fetch(const uint8_t* tile, int quads) const {
        if (!tiled_) return;
        fetch_in_order(tile + quads * 128), fetch_in_order(tile + quads * 128 + 64);
    }

private:
    HOP_ALONE void make(int64_t first, int64_t slice, uint8_t* out) const {
        const hop_operand& o = job_.p.rhs;
        const bool whole = first + kRows <= job_.p.n && (slice + 1) * kSlice <= job_.p.k;
        const bool narrow = is_narrow(o.format);
        const int64_t per_byte = narrow ? 2 : 1, stride = o.row_stride / per_byte;
        if (whole && (narrow || o.k_stride == 1)) {
            const auto* from = static_cast<const uint8_t*>(job_.rhs.codes) + first * stride + slice * kSlice / per_byte;
            // 16 rows are too many streams for the hardware prefetcher; a line has the 4-bit codes of two slices.
            for (int64_t i = slice % per_byte * kRows / per_byte, end = i + kRows / per_byte; i < end; ++i)
                _mm_prefetch(reinterpret_cast<const char*>(from + i * stride + 8 * kSlice / per_byte), _MM_HINT_T0);
            if (narrow) return narrow_tile_from_rows(from, stride, out);
        }
        uint8_t buffer[kTile];
        const uint8_t* codes = tile_of_codes(o, job_.rhs.codes, job_.p.n, job_.p.k, first, slice, narrow ? buffer : out);
        if (narrow) narrow_tile(codes, out);
    }

    const Job& job_;
    int64_t first_, bytes_;
    bool tiled_;
    alignas(32) uint8_t made_[2 * kTile];
};
