// Quantizes x times one factor per column, row by row, so that products and their noise stay in the first-level cache.
// If x is transposed, as many rows as fit in a cache line are gathered first. Included in a namespace (isa.h), after
// run.h.

// The memory of one thread.
struct ProductRoom {
    int64_t side;  // rows at a time
    float* product;
    uint32_t* noise;
    char *rows, *rest;

    static int64_t side_of(const Loops& loops) { return kLine / loops.bytes; }
    // `cols`: columns at a time, out of `all`.
    static int64_t noise_bytes(int64_t cols) { return divide_up(cols + BLOCK, GROUP * BLOCK) * GROUP * BLOCK * 4; }
    static size_t bytes(int64_t cols, int64_t all, const Product& p) {
        return size_t(divide_up(cols, 16) * 64 + (p.seed ? noise_bytes(cols) : 0) + (p.turned ? kLine * all : 0) + kLine);
    }
    ProductRoom(char* memory, const Loops& loops, int64_t cols, int64_t all, const Product& p) {
        side = side_of(loops);
        product = reinterpret_cast<float*>(memory);
        noise = reinterpret_cast<uint32_t*>(memory + divide_up(cols, 16) * 64);
        rows = memory + divide_up(cols, 16) * 64 + (p.seed ? noise_bytes(cols) : 0);
        rest = rows + (p.turned ? kLine * all : 0);
        rest += kLine - reinterpret_cast<uintptr_t>(rest) % kLine;
    }
};

// rows[j * cols + i] = x[i * stride + j] for `count` j and all `cols` i.
template <class Word>
static void gather_rows(const Word* x, int64_t stride, int64_t cols, int64_t count, Word* rows) {
    constexpr int64_t side = kLine / int64_t(sizeof(Word));
    int64_t i = 0;
    for (; count == side && i + side <= cols; i += side) {
        for (int64_t k = 0; i + 2 * side <= cols && k < side; ++k) __builtin_prefetch(x + (i + side + k) * stride);
        transpose_lines(x + i * stride, stride, rows + i, cols);
    }
    for (; i < cols; ++i)
        for (int64_t j = 0; j < count; ++j) rows[j * cols + i] = x[i * stride + j];
}

// Quantizes a strip, whose elements are at x.
static void quantize_strip_product(const QuantizeCall& c, const Loops& loops, const Product& p, const Strip& s, const void* x,
                                   ProductRoom& own, Room& room) {
    const hop_blocks& g = c.blocks;
    const int64_t first = s.row * g.cols + s.col, per_byte = codes_per_byte(c.q);
    loops.widen(x, s.cols, p.factor + s.col, own.product);
    const void* noise = nullptr;
    if (c.noise) noise = static_cast<const char*>(c.noise) + first * (c.noise_bits == 24 ? 4 : 1);
    if (p.seed) {
        const int64_t block = first / BLOCK, skipped = first % BLOCK;
        for (int64_t done = 0; done < skipped + s.cols; done += GROUP * BLOCK)
            wide_noise(uint64_t(*p.seed), p.stream, uint64_t(block + done / BLOCK), own.noise + done);
        noise = own.noise + skipped;
    }
    const hop_blocks row{1, 1, s.cols, 1, g.tile_cols, s.cols};
    uint8_t* codes = c.codes + s.row * divide_up(g.cols, per_byte) + s.col / per_byte;
    const QuantizeCall one{c.q, row, own.product, nullptr, false, nullptr, noise, p.seed ? 24 : c.noise_bits,
                           codes, c.scale, c.second, 1, false};
    quantize_strip(one, loops_of<F32>(), Strip{0, 1, 0, s.cols, s.first, s.count}, nullptr, room);
}

static int quantize_rows_product(const QuantizeCall& c, const Loops& loops, const Product& p) {
    const hop_blocks& g = c.blocks;
    const Strips strips(g);
    const int64_t side = ProductRoom::side_of(loops), bytes = loops.bytes;
    const int64_t groups = divide_up(g.rows, side), width = least(g.cols, strips.width * g.tile_cols);
    const auto* all = static_cast<const char*>(c.x);
    std::atomic<int> result{HOP_OK};
    Queue queue(g.batch * groups);
    parallel(worth(c.threads, g.batch * g.rows * g.cols, kLarge / 2), [&](int, int) {
        char* memory = scratch(ProductRoom::bytes(width, g.cols, p) + Room::bytes(strips.width));
        if (!memory) {
            result = HOP_NO_MEMORY;
            return;
        }
        ProductRoom own(memory, loops, width, g.cols, p);
        Room room(own.rest, strips.width, c.q.affine);
        for (int64_t i, end; queue.take(i, end);) {
            const int64_t member = i / groups, first = i % groups * side, count = least(side, g.rows - first);
            const char* x = all + (member * g.rows + first) * g.row_stride * bytes;
            int64_t stride = g.row_stride;
            if (p.turned) {
                const char* turned = all + (member * g.rows * g.cols + first) * bytes;
                const auto gather = [&](auto word) {
                    using Word = decltype(word);
                    gather_rows(reinterpret_cast<const Word*>(turned), g.rows, g.cols, count, reinterpret_cast<Word*>(own.rows));
                };
                bytes == 4 ? gather(uint32_t{}) : gather(uint16_t{});
                x = own.rows, stride = g.cols;
            }
            for (int64_t row = 0; row < count; ++row)
                for (int64_t j = 0; j < strips.per_row; ++j) {
                    const Strip s = strips[(member * g.rows + first + row) * strips.per_row + j];
                    quantize_strip_product(c, loops, p, s, x + (row * stride + s.col) * bytes, own, room);
                }
        }
    });
    return result;
}
