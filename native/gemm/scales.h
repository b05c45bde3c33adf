// Scales and zero points of an operand's rows. Included in a namespace (isa.h), after tiles.

// Calls body(i, index) for rows first..first + count - 1 with the index of their block.
template <class Body>
inline void for_blocks(int64_t rows, int64_t first, int64_t count, Body body) {
    int64_t block = first / rows, left = rows - first % rows;
    for (int64_t i = 0; i < count; ++i, --left) {
        if (left == 0) ++block, left = rows;
        body(i, block);
    }
}

inline float scale_at(int format, const void* data, int64_t index) {
    return format == HOP_FLOAT32 ? static_cast<const float*>(data)[index]
                                 : scale_table(format)[static_cast<const uint8_t*>(data)[index]];
}

// Loads the scales of `count` rows at one k.
inline void load_scales(const hop_scale& s, const void* data, int64_t first, int64_t count, int64_t k, float* scales) {
    if (s.format == HOP_NONE) {
        for (int64_t i = 0; i < count; ++i) scales[i] = 1.f;
        return;
    }
    const int64_t of_k = k / s.ks * s.k_stride;
    for_blocks(s.row_stride == 0 ? first + count + 1 : s.rows, first, count, [&](int64_t i, int64_t block) {
        scales[i] = scale_at(s.format, data, block * s.row_stride + of_k) * s.factor;
    });
}

// Loads the zero points of `count` rows at one k, for codes converted to int8.
inline void load_zeros(const hop_operand& o, const void* data, int64_t first, int64_t count, int64_t k, int32_t* zeros) {
    const int shift = o.format == HOP_UINT8 ? 128 : 0;
    if (o.zero_format == HOP_NONE) {
        for (int64_t i = 0; i < count; ++i) zeros[i] = o.zero - shift;
        return;
    }
    const hop_scale& s = o.scale;
    const int64_t of_k = k / s.ks * s.k_stride;
    for_blocks(s.row_stride == 0 ? first + count + 1 : s.rows, first, count, [&](int64_t i, int64_t block) {
        const int64_t at = block * s.row_stride + of_k;
        zeros[i] = (o.zero_format == HOP_INT8 ? static_cast<const int8_t*>(data)[at] : static_cast<const uint8_t*>(data)[at]) - shift;
    });
}

// The scales of 32 rows, block by block along k. If a row's scales are contiguous, many blocks are loaded at a time.
class BlockScales {
public:
    BlockScales(const hop_scale& s, const void* data, int64_t rows, int64_t k)
        : s_(s), data_(static_cast<const uint8_t*>(data)), rows_(rows), blocks_(s.ks < k ? ceil_div(k, s.ks) : 1),
          together_(s.format != HOP_NONE && s.rows == 1 && s.k_stride == 1 && blocks_ >= 8) {
        while (shift_ < 62 && int64_t(1) << shift_ < s.ks) ++shift_;
        if (int64_t(1) << shift_ != s.ks) shift_ = -1;
    }

    // Returns the scales of rows first..first + 31 in the block that contains k, 0 for missing rows; the scales of the
    // following blocks come after them, up to the end of the aligned window of kWindow blocks. Valid until the next
    // call.
    const float* at(int64_t first, int64_t k) {
        const int64_t block = blocks_ == 1 ? 0 : shift_ >= 0 ? k >> shift_ : k / s_.ks, begin = block / kWindow * kWindow;
        if (first != first_ || begin != begin_) {
            fill(first_ = first, begin_ = begin);
            judged_ = false;
        }
        return window_[block - begin];
    }

    // Whether all scales of the window last loaded are 0, or between 2^-60 and 2^60.
    bool are_moderate() {
        if (!judged_) judge(blocks_ - begin_ < kWindow ? blocks_ - begin_ : kWindow);
        return moderate_;
    }

    static constexpr int kWindow = 64;  // blocks per load, aligned to multiples of it

private:

    void fill(int64_t first, int64_t begin) {
        const int64_t rest = rows_ - first, rows = rest < kBlock ? rest : kBlock;
        const int64_t bytes = s_.format == HOP_FLOAT32 ? 4 : 1, count = blocks_ - begin < kWindow ? blocks_ - begin : kWindow;
        if (!together_) {
            for (int64_t i = 0; i < count; ++i) {
                for (int64_t j = rows > 0 ? rows : 0; j < kBlock; ++j) window_[i][j] = 0.f;
                if (rows > 0) load_scales(s_, data_, first, rows, (begin + i) * s_.ks, window_[i]);
            }
            return;
        }
        for (int half = 0; half < 2; ++half)
            for (int64_t line = 0; line < bytes; ++line) {  // lines of 64 bytes: 64 / bytes blocks
                const int64_t each = kWindow / bytes, from = line * each;
                const int64_t here = count - from < each ? count - from : each;
                if (here > 0) part(first + half * kRows, rows - half * kRows, begin + from, here, bytes, half, from);
            }
    }

    void judge(int64_t count) {
        int bad = 0;
        for (int64_t i = 0; i < count; ++i)
            for (int j = 0; j < kBlock; ++j) {
                uint32_t bits;
                std::memcpy(&bits, &window_[i][j], 4);
                bad |= bits != 0 && bits - ((127u - 60) << 23) >= 120u << 23;
            }
        moderate_ = !bad, judged_ = true;
    }

    void part(int64_t first, int64_t rows, int64_t block, int64_t count, int64_t bytes, int half, int64_t at) {
        uint8_t own[kTile], tile[kTile];
        if (rows <= 0) {
            for (int64_t i = 0; i < count; ++i) std::memset(window_[at + i] + half * kRows, 0, sizeof(float) * kRows);
            return;
        }
        const uint8_t* from = data_ + (first * s_.row_stride + block) * bytes;
        int64_t stride = s_.row_stride * bytes;
        if (rows < kRows || count * bytes < kSlice) {
            std::memset(own, 0, sizeof(own));
            for (int64_t i = 0; i < rows && i < kRows; ++i) std::memcpy(own + i * kSlice, from + i * stride, count * bytes);
            from = own, stride = kSlice;
        }
        if (bytes == 4 && count == kRows) return numbers_from_rows(from, stride, s_.factor, window_[at] + half * kRows, kBlock);
        tile_from_rows(from, stride, tile);
        for (int64_t i = 0; i < count; ++i) {
            float* out = window_[at + i] + half * kRows;
            if (bytes == 4) {
                float own_scales[kRows];
                std::memcpy(own_scales, tile + i * 64, 64);
                for (int j = 0; j < kRows; ++j) out[j] = own_scales[j] * s_.factor;
            } else {
                scales_of_quads(s_.format, tile + i / 4 * 64, static_cast<int>(i % 4), out);
                if (s_.factor != 1.f)
                    for (int j = 0; j < kRows; ++j) out[j] *= s_.factor;
            }
        }
        if (bytes == 1 && rows < kRows)  // byte 0 need not represent 0
            for (int64_t i = 0; i < count; ++i)
                for (int64_t j = rows; j < kRows; ++j) window_[at + i][half * kRows + j] = 0.f;
    }

    const hop_scale& s_;
    const uint8_t* data_;
    int64_t rows_, blocks_;
    bool together_;
    int shift_ = 0;  // log2 of ks, -1 if it is not a power of two
    int64_t first_ = -1, begin_ = -1;
    bool judged_ = false, moderate_ = true;
    alignas(64) float window_[kWindow][kBlock];
};

// The data of 32 rows, or columns, in one group: scale, zero point, the sum of the codes minus a constant, and the
// results of pair_row and pair_column.
struct Side {
    alignas(64) float scale[kBlock];
    alignas(64) int32_t zero[kBlock];
    alignas(64) int32_t sum[kBlock];
    alignas(64) int32_t pair[kBlock];
};

// The contribution of the zero points of a row and a column to a sum of few terms, as a product of two pairs of 16
// bits:
//
//     (za, Σ a) · (terms · zb - Σ b, -zb) = -za Σ b - zb Σ a + terms · za · zb
//
// Requires zero points within the range of the codes: 128 differences of 255 fit in 16 bits.
inline bool are_paired(const Job& job) {
    constexpr int64_t most = 128;
    const auto within = [](const hop_operand& o) {
        if (o.format == HOP_UINT8) return o.zero_format == HOP_NONE ? o.zero >= 0 && o.zero < 256 : o.zero_format == HOP_UINT8;
        if (o.zero_format == HOP_NONE) return o.zero >= -128 && o.zero < 128;
        return o.zero_format == HOP_INT8 || o.format == HOP_UINT4;
    };
    return job.group <= most && within(job.p.lhs) && within(job.p.rhs);
}

inline void pair_row(Side& a) {
    for (int i = 0; i < kBlock; ++i) a.pair[i] = static_cast<int32_t>((a.zero[i] & 0xffff) | static_cast<uint32_t>(a.sum[i]) << 16);
}
inline void pair_column(Side& b, int64_t terms) {
    const auto all = static_cast<int32_t>(terms);
    for (int i = 0; i < kBlock; ++i)
        b.pair[i] = static_cast<int32_t>(((all * b.zero[i] - b.sum[i]) & 0xffff) | static_cast<uint32_t>(-b.zero[i]) << 16);
}
