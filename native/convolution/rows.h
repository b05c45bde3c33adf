// The pixels that are multiplied together, in blocks of 32. Included in a namespace (isa.h), after gemm.h.

struct Need {
    void* pointer;  // address of the pointer to set to a buffer of `bytes` bytes
    int64_t bytes;
};

// A block of rows that an engine reads.
struct Rows {
    const uint8_t* at;  // the first element of the rows, or their tiles
    int64_t first;      // index of the first row, among all rows of `take`
    int64_t example;
    int count;
};

// With Windows, an engine reads rows at any address; without, tiles as in products.
template <class Engine, bool Windows>
class Pixels {
public:
    explicit Pixels(const Convolution& c) : c_(c), builder_(c) {}

    template <class Add>
    void need(Add add) {
        const bool gathers = !c_.windows, rows = gathers && !c_.depthwise;
        const int64_t most = c_.blocks * kBlock;
        add({&image_, c_.borrowed ? 0 : c_.image_bytes});
        add({&line_, builder_.line_bytes() + kSlice});
        add({&rows_, rows ? (Windows ? most : kBlock) * c_.row_stride() + kSlice : 0});
        add({&tiles_, rows && !Windows ? most * c_.row_stride() * Engine::kLhsBytes : 0});
        add({&at_, most * 8});
        add({&from_, gathers ? most * 8 : 0});
        add({&blocks_, c_.blocks * int64_t(sizeof(Rows))});
        add({&segments_, gathers ? (c_.taps + kTaps) * 8 : 0});
    }
    void begin() {
        if (!c_.windows) find_segments();
    }

    int64_t count() const { return count_; }
    const Rows& block(int64_t i) const { return blocks_[i]; }
    const int64_t* stored_at(const Rows& block) const {
        return at_ + block.first;
    }  // positions in the output; negative: not stored
    const int64_t* lie_at(const Rows& block) const { return from_ + block.first; }  // addresses of the first elements
    const int64_t* tap_offsets() const { return segments_; }  // of a depthwise convolution

    void take(int64_t row_group) {
        const Dimension& outer = c_.dims[c_.outer];
        const int64_t example = row_group / c_.bands * c_.examples, first = row_group % c_.bands * c_.band;
        const int64_t count = outer.outputs - first < c_.band ? outer.outputs - first : c_.band;
        int64_t rows = 0;
        count_ = 0;
        for (int64_t n = example; n < example + c_.examples && n < c_.batch; ++n) {
            const uint8_t* image;
            if (c_.borrowed) {
                image = static_cast<const uint8_t*>(c_.job.lhs.codes) + n * c_.example_at +
                        first * outer.step * c_.at[c_.outer];
            } else {
                uint8_t* own = image_ + (n - example) * c_.example_at;
                builder_.build(n, first, count, own, line_);
                image = own;
            }
            rows = place(n, first, count, image, rows);
        }
    }

    // Gathers the rows of all blocks for a unit.
    void gather(int64_t unit) {
        const int64_t stride = c_.row_stride(), first = unit * c_.inputs;
        const bool in_place = c_.inputs % kSlice == 0;  // slices of a row are contiguous in the image
        uint8_t* tiles = tiles_;
        for (int64_t b = 0; b < count_; ++b) {
            Rows& block = blocks_[b];
            uint8_t* rows = Windows ? rows_ + block.first * stride : rows_;
            for (int i = 0; (Windows || !in_place) && i < block.count; ++i) gather_row(pixel(block, i) + first, rows + i * stride);
            block.at = rows;
            if constexpr (!Windows) {
                block.at = tiles;
                if (in_place) tiles = to_tiles(block.count, tiles, [&](int64_t slice) {
                    const int64_t at = slice * kSlice;
                    const int64_t offset = first + segments_[at / segment_] + at % segment_;
                    return [this, &block, offset](int i) { return pixel(block, i) + offset; };
                });
                else tiles = to_tiles(block.count, tiles, [&](int64_t slice) {
                    return [rows, stride, slice](int i) { return rows + i * stride + slice * kSlice; };
                });
            }
        }
    }

private:
    static constexpr int kLhsUnit = Engine::kLhsBytes * kTile;

    // Places the rows of an example's outputs, from `row` on: where each is stored, and where it is read. Returns the
    // next row.
    int64_t place(int64_t example, int64_t first, int64_t count, const uint8_t* image, int64_t row) {
        int64_t from[3] = {}, counts[3] = {c_.dims[0].outputs, c_.dims[1].outputs, c_.dims[2].outputs};
        from[c_.outer] = first, counts[c_.outer] = count;
        const int64_t all = c_.rows_of(count);
        if (c_.windows)
            for (int64_t i = 0; i < all; ++i) at_[row + i] = -1;
        const int64_t base =
            c_.c.channels_last ? example * c_.pixels * c_.c.outputs : example * c_.c.outputs * c_.pixels;
        const int64_t each = c_.c.channels_last ? c_.c.outputs : 1;
        int64_t next = row;
        for (int64_t z = 0; z < counts[0]; ++z)
            for (int64_t y = 0; y < counts[1]; ++y) {
                const int64_t pixel = ((z + from[0]) * c_.dims[1].outputs + y + from[1]) * c_.dims[2].outputs + from[2];
                const int64_t offset = z * c_.dims[0].step * c_.at[0] + y * c_.dims[1].step * c_.at[1];
                if (c_.windows) {
                    const int64_t line = row + offset / c_.row_at;
                    for (int64_t x = 0; x < counts[2]; ++x) at_[line + x] = base + (pixel + x) * each;
                } else {
                    for (int64_t x = 0; x < counts[2]; ++x, ++next) {
                        at_[next] = base + (pixel + x) * each;
                        from_[next] = reinterpret_cast<int64_t>(image) + offset + x * c_.dims[2].step * c_.at[2];
                    }
                }
            }
        return cut(example, first == 0, all, image, row);
    }

    // Cuts rows into blocks. An engine of whole tiles that reads in place needs blocks of 16 or 32 rows. There is no
    // memory after the last row, so the last block begins earlier, and does not store the repeated rows; but before the
    // first row there is none either if `leading`.
    int64_t cut(int64_t example, bool leading, int64_t rows, const uint8_t* image, int64_t row) {
        bool exact = false;
        if constexpr (Windows) exact = Engine::kWhole && c_.windows && c_.borrowed;
        for (int64_t i = 0; i < rows;) {
            const int64_t rest = rows - i;
            int64_t here = rest < kBlock ? rest : kBlock, back = 0;
            if (exact && here != kBlock && here != kRows) {
                const int64_t whole = here < kRows ? kRows : kBlock;
                back = whole - here;
                if (leading && back > i) here = kRows, back = 0;  // two small blocks instead
                if (back > 0) {
                    for (int64_t j = rest - 1; j >= 0; --j) at_[row + i + back + j] = at_[row + i + j];
                    for (int64_t j = 0; j < back; ++j) at_[row + i + j] = -1;
                    here = whole;
                }
            }
            blocks_[count_++] = {image + (i - back) * c_.row_at, row + i, example, static_cast<int>(here)};
            row += back, i += here - back;
        }
        return row + rows;
    }

    void find_segments() {
        const Dimension& w = c_.dims[2];
        const bool runs = c_.units == 1 && w.dilation == 1 && c_.at[2] == c_.inputs && !c_.depthwise;
        segment_ = runs ? w.kernel * c_.inputs : c_.inputs;
        const int64_t of_line = runs ? 1 : w.kernel;
        segment_count_ = 0;
        for (int64_t z = 0; z < c_.dims[0].kernel; ++z)
            for (int64_t y = 0; y < c_.dims[1].kernel; ++y)
                for (int64_t x = 0; x < of_line; ++x)
                    segments_[segment_count_++] = z * c_.dims[0].dilation * c_.at[0] +
                                                  y * c_.dims[1].dilation * c_.at[1] + x * w.dilation * c_.at[2];
        for (int i = 0; i < kTaps - 1 && c_.depthwise; ++i) segments_[segment_count_ + i] = segments_[0];
    }

    // Codes beyond the end of a row are multiplied by zeros.
    void gather_row(const uint8_t* from, uint8_t* row) const {
        const int64_t bytes = segment_;
        const int64_t *offset = segments_, *end = segments_ + segment_count_;
        if (c_.borrowed) {
            for (; offset < end; ++offset, row += bytes) std::memcpy(row, from + *offset, static_cast<size_t>(bytes));
            return;
        }
        // Copies whole units; the next copy overwrites the excess. Image and rows are longer than their used part.
        constexpr int64_t kUnit = 32;
        if (bytes <= kUnit) {
            for (; offset < end; ++offset, row += bytes) std::memcpy(row, from + *offset, kUnit);
            return;
        }
        for (; offset < end; ++offset, row += bytes)
            for (int64_t i = 0; i < bytes; i += kUnit) std::memcpy(row + i, from + *offset + i, kUnit);
    }

    const uint8_t* pixel(const Rows& block, int i) const { return reinterpret_cast<const uint8_t*>(from_[block.first + i]); }

    // of_slice(slice) returns a function from rows to the addresses of their codes in that slice.
    template <class OfSlice>
    uint8_t* to_tiles(int count, uint8_t* out, OfSlice of_slice) const {
        const int tiles = count > kRows ? 2 : 1;
        alignas(64) uint8_t made[2 * kTile];
        for (int64_t slice = 0; slice < c_.slices; ++slice, out += tiles * kLhsUnit) {
            uint8_t* codes = OwnLhs<Engine>::value ? made : out;
            if (count % kRows) std::memset(codes + count / kRows * kTile, 0, kTile);
            const auto row = of_slice(slice);
            for (int i = 0; i < count; ++i) to_lhs(c_.job.p.lhs.format, c_.job.shift != 0, row(i), codes + i * kSlice);
            if constexpr (OwnLhs<Engine>::value)
                for (int i = 0; i < tiles; ++i) Engine::lhs_tile(made + i * kTile, out + i * kLhsUnit);
        }
        return out;
    }

    const Convolution& c_;
    Image builder_;
    uint8_t *image_ = nullptr, *line_ = nullptr, *rows_ = nullptr, *tiles_ = nullptr;
    int64_t *at_ = nullptr, *from_ = nullptr, *segments_ = nullptr;
    Rows* blocks_ = nullptr;
    int64_t count_ = 0, segment_ = 0, segment_count_ = 0;
};
