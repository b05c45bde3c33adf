// The loops of every product. Included in a namespace (isa.h), after tiles, packing, epilogue and groups.
//
//     pack lhs                            all threads, once for each slab of rows
//     make tiles of rhs                   likewise, for as many panels as the cache holds, if they are used often; then
//     for each group of row blocks        its tiles stay in the second-level cache
//       for each panel of 32 columns      threads take panels
//         for each chunk of slices        the panel's tiles stay in the first-level cache, decoded if codes are not tiles
//           for each row block            an engine multiplies 32 rows by 32 columns
//
// An Engine defines the type of its sums, the bytes of an element of its tiles (kBytes; kLhsBytes for lhs), and
//
//     Engine(rows, quads)                         rows of a row block (16 or fewer: of the only block); quads of a step
//     template <int R> multiply(a, b, rows, slices, sums, add, between)
//                                                 multiplies `rows` of R · 16 rows by 32 columns, over whole slices
//     template <int R> step(a, b, rows, quad, sums, between)      the same over `quads` quads of a slice, overwriting sums
//
// It calls between() regularly, in `multiply` after each slice, for other work that overlaps with the products.
// Optional members:
//
//     lhs_tile(tile, out)                         converts a tile of lhs to the engine's format
//     lhs_slice(job, first, rows, slice, out), rhs_tile(job, folds, first, slice, out)
//                                                 makes engine-specific tiles from codes, with any bytes per element
//     reads_codes(yes)                            receives whether tiles of rhs are packed codes, in memory
//     kLongChunk                                  bytes of a chunk of integers
//     kGroup                                      bytes of lhs in a group of row blocks
//     kFetched                                    rows up to which the engine prefetches packed codes itself
//     keeps(job), groups(job, kept, rows, between)      the groups of a chunk, scaled and added, if kKept

// Memory to prefetch while multiplying.
class Ahead {
public:
    Ahead(const void* data, int64_t bytes, int64_t steps)
        : at_(static_cast<const char*>(data)), each_(ceil_div(ceil_div(bytes, 64), steps) * 64), left_(data ? bytes : 0) {}
    void operator()() {
        if (left_ <= 0) return;
        for (int64_t i = 0; i < each_; i += 64) __builtin_prefetch(at_ + i, 0, 2);
        at_ += each_, left_ -= each_;
    }

private:
    const char* at_;
    int64_t each_, left_;
};

// Prefetches the scales or zero points of the next panel's rows, if they are contiguous.
inline HOP_ALONE Ahead rows_ahead(const Job& job, const hop_scale& s, const void* data, int64_t first, int64_t bytes) {
    if (!data || s.rows != 1 || s.k_stride != 1 || first + 2 * kBlock > job.p.n) return Ahead(nullptr, 0, 1);
    const int64_t size = kBlock * s.row_stride * bytes;
    return Ahead(static_cast<const char*>(data) + first / kBlock * size + size, size, job.groups);
}

template <class Engine, class = void>
struct OwnLhs : std::false_type {};
template <class Engine>
struct OwnLhs<Engine, std::void_t<decltype(&Engine::lhs_tile)>> : std::true_type {};

template <class Engine, class = void>
struct OwnTiles : std::false_type {};
template <class Engine>
struct OwnTiles<Engine, std::void_t<decltype(&Engine::lhs_slice)>> : std::true_type {};

template <class Engine, class = void>
struct ReadsCodes : std::false_type {};
template <class Engine>
struct ReadsCodes<Engine, std::void_t<decltype(&Engine::reads_codes)>> : std::true_type {};

template <class Few, class = void>
struct SumsColumns : std::false_type {};
template <class Few>
struct SumsColumns<Few, std::void_t<decltype(Few::kSumsColumns)>> : std::true_type {};

template <class Engine, class = void>
struct ChunkBytes : std::integral_constant<int64_t, kChunkBytes> {};
template <class Engine>
struct ChunkBytes<Engine, std::void_t<decltype(Engine::kLongChunk)>> : std::integral_constant<int64_t, Engine::kLongChunk> {};

template <class Engine, class = void>
struct GroupBytes : std::integral_constant<int64_t, 1 << 20> {};
template <class Engine>
struct GroupBytes<Engine, std::void_t<decltype(Engine::kGroup)>> : std::integral_constant<int64_t, Engine::kGroup> {};

template <class Engine, class = void>
struct FetchedRows : std::integral_constant<int64_t, 0> {};
template <class Engine>
struct FetchedRows<Engine, std::void_t<decltype(Engine::kFetched)>> : std::integral_constant<int64_t, Engine::kFetched> {};

template <class Engine>
class Multiplication {
public:
    using Sum = typename Engine::Sum;
    static constexpr int kBytes = Engine::kBytes;
    static constexpr int kUnit = kBytes * kTile, kLhsUnit = Engine::kLhsBytes * kTile;  // bytes of a tile
    static constexpr bool kInteger = kBytes == 1;

    explicit Multiplication(Job& job) : job_(job) {
        if constexpr (Engine::kKept) kept_ = Engine::keeps(job);
        const int64_t group_slices = ceil_div(job.group, kSlice);
        ready_ = kInteger && job.p.rhs.layout == HOP_TILED && job.p.rhs.format == HOP_INT8;
        chunk_ = (job.grouped() ? kChunkBytes : ChunkBytes<Engine>::value) / (2 * kUnit) / (job.grouped() && !kept_ ? 2 : 1);
        if (job.grouped()) {
            per_slice_ = job.group < kSlice ? static_cast<int>(kSlice / job.group) : 1;
            chunk_ = group_slices >= chunk_ ? group_slices : chunk_ / group_slices * group_slices;
        }
        // If a chunk of twice the length covers all k, it costs less than moving the sums to memory and back. Codes
        // that are read once need not stay in the cache.
        const bool once = ready_ && job.p.m <= kReadOnce, twice = kInteger && job.slices <= 2 * kChunkBytes / (2 * kUnit);
        if (!job.grouped() && (once || twice)) chunk_ = job.slices;
        if (chunk_ > job.slices) chunk_ = job.slices;
        block_bytes_ = job.slices * 2 * kLhsUnit;
        slab_ = kSlabBytes / block_bytes_;
        slab_ = slab_ < kBlock / 2 ? kBlock / 2 : slab_;
        lhs_zero_ = kInteger && lhs_has_zero(job);
        rhs_zero_ = kInteger && rhs_has_zero(job);
        sides_ = rhs_zero_ || job.p.lhs.scale.ks < job.p.k ? job.groups : 1;
    }

    int run() {
        const int64_t blocks = ceil_div(job_.p.m, kBlock);
        for (int64_t first = 0; first < blocks; first += slab_) {
            const int64_t count = blocks - first < slab_ ? blocks - first : slab_;
            if (const int error = slab(first, count)) return error;
        }
        return HOP_OK;
    }

private:
    static constexpr int64_t kSlabBytes = 16 << 20, kMostGroup = 16;
    static constexpr int64_t kReadOnce = 2;  // rows that all engines multiply at once
    static constexpr int64_t kGrain = 4;  // panels that a thread takes at a time

    int rows_of(int64_t block) const {
        const int64_t rest = job_.p.m - block * kBlock;
        return static_cast<int>(rest < kBlock ? rest : kBlock);
    }

    int slab(int64_t first, int64_t count) {
        static thread_local Scratch tiles, sides;
        lhs_ = tiles.get(static_cast<size_t>(count * block_bytes_));
        lhs_sides_ = reinterpret_cast<Side*>(sides.get(sizeof(Side) * static_cast<size_t>(count * sides_)));
        if (!lhs_ || !lhs_sides_) return HOP_NO_MEMORY;
        const int64_t panels = ceil_div(job_.p.n, kBlock);
        int64_t of_group = GroupBytes<Engine>::value / block_bytes_;
        of_group = of_group < 1 ? 1 : of_group > kMostGroup ? kMostGroup : of_group;
        if (of_group > count) of_group = count;
        const int64_t row_groups = ceil_div(count, of_group);
        // For many rows, rhs is converted to tiles once, unless conversion is fast. The same for column-major rhs,
        // where several panels share cache lines and pages.
        const bool fast = OwnTiles<Engine>::value && job_.p.rhs.layout == HOP_TILED;
        const bool ahead = !ready_ && ((row_groups > 1 && !fast) || (job_.p.rhs.layout == HOP_STRIDED && job_.p.rhs.k_stride > 1 && panels > 1));
        static thread_local Scratch strips;
        const int64_t of_panel = job_.slices * 2 * kUnit;
        int64_t strip = ahead ? ceil_div(kSlabBytes, of_panel * kGrain) * kGrain : panels;
        if (strip > panels) strip = panels;
        made_ = ahead ? reinterpret_cast<uint8_t*>(strips.get(static_cast<size_t>(strip * of_panel))) : nullptr;
        if (ahead && !made_) return HOP_NO_MEMORY;

        std::atomic<int> error{HOP_OK};
        const int threads = worth(job_.threads, count * panels * (job_.slices + 8), 64);
        for (strip_ = 0; strip_ < panels; strip_ += strip) {
            const int64_t here = panels - strip_ < strip ? panels - strip_ : strip;
            Queue packing(strip_ == 0 ? count : 0), making(ahead ? here : 0, kGrain), work(row_groups * here, kGrain, threads);
            Barrier packed;
            parallel(threads, [&](int, int team) {
                int64_t begin, end;
                while (packing.take(begin, end)) pack(first + begin, begin);
                while (making.take(begin, end)) make(strip_ + begin, strip_ + end);
                packed.wait(team);
                Worker worker(*this, of_group);
                if (!worker.ready()) {
                    error = HOP_NO_MEMORY;
                    return;
                }
                while (work.take(begin, end))
                    for (; begin < end; ++begin) {
                        const int64_t rows = begin / here * of_group, n = strip_ + begin % here;
                        const int64_t last_row = rows + of_group < count ? rows + of_group : count;
                        worker.panel(first, rows, last_row, n, begin + 1 < end && n + 1 < panels ? n + 1 : -1);
                    }
                fence();
            });
        }
        tiles.trim();
        sides.trim();
        strips.trim();
        return error;
    }

    // Makes the tiles of panels first..last - 1 of a strip.
    void make(int64_t first, int64_t last) {
        const Words words(job_.p.rhs.format);
        BlockScales folds(job_.p.rhs.fold, job_.rhs.fold, job_.p.n, job_.p.k);
        const bool together = job_.p.rhs.layout == HOP_STRIDED;  // slice by slice: panels share the cache lines that are read
        const int64_t panels = together ? last - first : 1;
        for (int64_t from = first; from < last; from += panels)
            for (int64_t slice = 0; slice < job_.slices; ++slice) {
                int64_t n = from;
                while (n + 2 <= from + panels && make_two(n, slice)) n += 2;
                for (; n < from + panels; ++n)
                    for (int half = 0; half < 2; ++half)
                        make_tile(words, folds, n * kBlock + half * kRows, slice, made_of(n, slice) + half * kUnit);
            }
    }

    // Makes the tiles of two panels from columns of bytes; false unless all rows and k of the panels exist.
    bool make_two(int64_t n, int64_t slice) {
        const hop_operand& o = job_.p.rhs;
        if (!kInteger || o.layout != HOP_STRIDED || is_narrow(o.format) || o.row_stride != 1) return false;
        if ((slice + 1) * kSlice > job_.p.k || (n + 2) * kBlock > job_.p.n) return false;
        uint8_t* const tiles[4] = {made_of(n, slice), made_of(n, slice) + kUnit, made_of(n + 1, slice), made_of(n + 1, slice) + kUnit};
        tiles_from_columns(static_cast<const uint8_t*>(job_.rhs.codes) + n * kBlock + slice * kSlice * o.k_stride, o.k_stride, tiles);
        for (int i = 0; o.format == HOP_UINT8 && i < 4 * kQuads; ++i)
            to_int8(o.format, tiles[i / kQuads] + i % kQuads * 64, tiles[i / kQuads] + i % kQuads * 64);
        return true;
    }

    void pack(int64_t block, int64_t at) {
        const int rows = rows_of(block), tiles = rows > kRows ? 2 : 1;
        auto* out = reinterpret_cast<uint8_t*>(lhs_ + at * block_bytes_);
        for (int64_t slice = 0; slice < job_.slices; ++slice, out += tiles * kLhsUnit) {
            if constexpr (!OwnLhs<Engine>::value) {
                pack_slice(block, rows, slice, out);
            } else {
                uint8_t made[2 * kUnit];
                pack_slice(block, rows, slice, made);
                for (int i = 0; i < tiles; ++i) Engine::lhs_tile(made + i * kUnit, out + i * kLhsUnit);
            }
        }
        BlockScales scales(job_.p.lhs.scale, job_.lhs.scale, job_.p.m, job_.p.k);
        for (int64_t g = 0; g < sides_; ++g)
            side_of_rows(job_, scales, block * kBlock, rows, g, rhs_zero_, lhs_sides_[at * sides_ + g]);
    }

    void pack_slice(int64_t block, int rows, int64_t slice, uint8_t* out) {
        if (rows % kRows) std::memset(out + rows / kRows * kUnit, 0, kUnit);
        if constexpr (OwnTiles<Engine>::value) Engine::lhs_slice(job_, block * kBlock, rows, slice, out);
        else if constexpr (kInteger) pack_int8(job_, block * kBlock, rows, slice, out);
        else pack_words(job_, block * kBlock, rows, slice, out);
    }

    // Scales the sums of one group, some rows at a time, while the engine computes the next group's sums; prefetches
    // the data that follows.
    class Scaling {
    public:
        explicit Scaling(const Job& job) : job_(job) {}
        Ahead ahead{nullptr, 0, 1};
        void begin(const GroupSums<Sum>& sums, int rows) { sums_ = sums, at_ = 0, rows_ = rows; }
        void divide(int calls) { each_ = calls == 1 ? rows_ : (rows_ + calls - 1) / calls; }
        void operator()() {
            ahead();
            next(each_);
        }
        void end() { next(rows_); }

    private:
        void next(int rows) {
            const int first = at_;
            at_ = rows_ - first < rows ? rows_ : first + rows;
            if (first < at_) add_group(job_, sums_, first, at_);
        }
        const Job& job_;
        GroupSums<Sum> sums_{};
        int at_ = 0, rows_ = 0, each_ = 0;
    };

    // The state of one thread.
    class Worker {
    public:
        Worker(Multiplication& m, int64_t blocks)
            : m_(m), job_(m.job_), engine_(static_cast<int>(m.job_.p.m < kRows ? m.job_.p.m : kRows), m.quads()),
              words_(job_.p.rhs.format), scales_(job_.p.rhs.scale, job_.rhs.scale, job_.p.n, job_.p.k),
              folds_(job_.p.rhs.fold, job_.rhs.fold, job_.p.n, job_.p.k), scaling_(job_) {
            const int64_t area = kBlock * kBlock * 4, chunk = m.ready_ ? 0 : m.chunk_ * 2 * kUnit;
            const int64_t of_sums = area * (job_.grouped() ? 2 : blocks), of_y = job_.grouped() ? area * blocks : 0;
            sides_ = m.job_.grouped() ? m.chunk_groups() : 1;
            static thread_local Scratch memory;
            char* p = memory.get(static_cast<size_t>(of_sums + of_y + chunk + sides_ * static_cast<int64_t>(sizeof(Side))));
            if (!p) return;
            tiles_ = reinterpret_cast<uint8_t*>(p), p += chunk;
            sums_ = reinterpret_cast<Sum*>(p), p += of_sums;
            y_ = reinterpret_cast<float*>(p), p += of_y;
            columns_ = reinterpret_cast<Side*>(p);
            if constexpr (ReadsCodes<Engine>::value) engine_.reads_codes(m.ready_);
            if constexpr (Engine::kFewRows) few_ = Engine::Few::take(job_, m_.tiles_of(0));
        }
        bool ready() const { return sums_ != nullptr; }

        // Multiplies rows begin..end - 1 of a slab by panel n; `next` is the panel after it, or -1.
        void panel(int64_t slab, int64_t begin, int64_t end, int64_t n, int64_t next) {
            load_bias(job_, n * kBlock, columns_of(n), bias_);
            if (few_ && few_panel(n)) return;
            if (job_.grouped()) return grouped_panel(slab, begin, end, n, next);
            side_of_columns(job_, scales_, n * kBlock, 0, *columns_);
            for (int64_t s = 0; s < job_.slices; s += m_.chunk_) {
                const int64_t count = job_.slices - s < m_.chunk_ ? job_.slices - s : m_.chunk_;
                const uint8_t* b = chunk(n, s, count, 1);
                Ahead ahead = ahead_of(n, next, s + count, count, count * (end - begin));
                for (int64_t block = begin; block < end; ++block) {
                    Sum* sums = sums_ + (block - begin) * kBlock * kBlock;
                    const int rows = m_.rows_of(slab + block);
                    if (rows > kRows)
                        engine_.template multiply<2>(m_.tiles_of(block) + s * 2 * kLhsUnit, b, rows, count, sums, s > 0, ahead);
                    else
                        engine_.template multiply<1>(m_.tiles_of(block) + s * kLhsUnit, b, rows, count, sums, s > 0, ahead);
                }
            }
            for (int64_t block = begin; block < end; ++block) {
                Sum* sums = sums_ + (block - begin) * kBlock * kBlock;
                finish(slab + block, *m_.side_of(block, 0), sums, n);
            }
        }

    private:
        // Multiplies without tiles of words; returns false if that is not possible.
        bool few_panel(int64_t n) {
            if constexpr (Engine::kFewRows) {
                float* y = job_.grouped() ? y_ : reinterpret_cast<float*>(sums_);
                if (!Engine::Few::multiply(job_, m_.tiles_of(0), m_.side_of(0, 0), m_.sides_, scales_, folds_, n, y)) return false;
                if (job_.grouped()) {
                    store(0, y, n);
                } else {
                    side_of_columns(job_, scales_, n * kBlock, 0, *columns_);
                    if constexpr (SumsColumns<typename Engine::Few>::value)
                        for (int j = 0; m_.lhs_zero_ && !knows_sums(job_) && j < kBlock; ++j)
                            columns_->sum[j] += sums_[(kBlock - 1) * kBlock + j];
                    finish(0, *m_.side_of(0, 0), sums_, n);
                }
                return true;
            }
            (void)n;
            return false;
        }

        // Prefetches, in `steps` steps, the memory that will be read: `count` slices of panel n from slice `end` on, or
        // the first slices of panel `next`.
        Ahead ahead_of(int64_t n, int64_t next, int64_t end, int64_t count, int64_t steps) const {
            // Prefetching codes twice slows their reading by a third.
            if (m_.ready_ && job_.p.m <= FetchedRows<Engine>::value) return Ahead(nullptr, 0, 1);
            const bool more = end < job_.slices;
            const void* source = more || next >= 0 ? m_.source(more ? n : next, more ? end : 0) : nullptr;
            return Ahead(source, count * m_.source_bytes(), steps);
        }

        // Returns the tiles of a chunk. Adds the sums of the columns' codes in each of `groups`, if they are needed and
        // not known.
        const uint8_t* chunk(int64_t n, int64_t first, int64_t count, int64_t groups) {
            const uint8_t* tiles = tiles_;
            if (m_.made_) {
                tiles = m_.made_of(n, first);
            } else if (m_.ready_) {
                tiles = static_cast<const uint8_t*>(job_.rhs.codes) + (n * job_.slices + first) * 2 * kTile;
            } else {
                for (int64_t i = 0; i < 2 * count; ++i) m_.make_tile(words_, folds_, n * kBlock + i % 2 * kRows, first + i / 2, tiles_ + i * kUnit);
            }
            if (!m_.lhs_zero_ && !m_.rhs_zero_) return tiles;
            if (!job_.grouped()) {
                for (int half = 0; m_.lhs_zero_ && !knows_sums(job_) && half < 2; ++half)
                    add_quads(tiles + half * kTile, kQuads, count, 2 * kTile, columns_->sum + half * kRows);
                return tiles;
            }
            for (int64_t i = 0; m_.lhs_zero_ && i < 2 * count; ++i)
                for (int quad = 0; quad < kQuads; quad += m_.quads())
                    add_quads(tiles + i * kTile + quad * 64, m_.quads(), 1, 0,
                              columns_[m_.group_at(first, i / 2, quad)].sum + i % 2 * kRows);
            for (int64_t g = 0; g < groups; ++g) pair_column(columns_[g], job_.terms(first * kSlice / job_.group + g));
            return tiles;
        }

        void grouped_panel(int64_t slab, int64_t begin, int64_t end, int64_t n, int64_t next) {
            const int64_t span = ceil_div(job_.group, kSlice);  // slices of a group
            for (int64_t s = 0; s < job_.slices; s += m_.chunk_) {
                const int64_t count = job_.slices - s < m_.chunk_ ? job_.slices - s : m_.chunk_;
                const int64_t group = s * kSlice / job_.group;
                const int64_t here = job_.groups - group < sides_ ? job_.groups - group : sides_;
                for (int64_t g = 0; g < here; ++g) side_of_columns(job_, scales_, n * kBlock, group + g, columns_[g]);
                const uint8_t* b = chunk(n, s, count, here);
                const int64_t steps = m_.kept_ ? here : m_.per_slice_ > 1 ? here * kBytes : count;
                scaling_.ahead = ahead_of(n, next, s + count, count, steps * (end - begin));
                int at = 0;
                for (int64_t block = begin; block < end; ++block) {
                    const int rows = m_.rows_of(slab + block);
                    if constexpr (Engine::kKept) {
                        if (m_.kept_) {
                            const int64_t stride = (rows > kRows ? 2 : 1) * kLhsUnit;
                            engine_.groups(job_, {m_.tiles_of(block) + s * stride, b, stride, here, count, span, m_.quads(),
                                                  m_.side_of(block, group), m_.sides_ > 1, columns_, group == 0,
                                                  y_ + (block - begin) * kBlock * kBlock}, rows, scaling_.ahead);
                            continue;
                        }
                    }
                    for (int64_t g = 0; g < here; ++g) {
                        Sum* sums = sums_ + (at ^= kBlock * kBlock);
                        const int64_t slice = m_.per_slice_ > 1 ? g / m_.per_slice_ : g * span;
                        const int64_t own = count - slice < span ? count - slice : span;
                        if (rows > kRows) group_sums<2>(m_.tiles_of(block) + (s + slice) * 2 * kLhsUnit, b + slice * 2 * kUnit, rows, g, own, sums);
                        else group_sums<1>(m_.tiles_of(block) + (s + slice) * kLhsUnit, b + slice * 2 * kUnit, rows, g, own, sums);
                        scaling_.begin({sums, m_.side_of(block, group + g), columns_ + g,
                                        job_.terms(group + g), group + g == 0, y_ + (block - begin) * kBlock * kBlock}, rows);
                    }
                }
                scaling_.end();
            }
            for (int64_t block = begin; block < end; ++block)
                store(slab + block, y_ + (block - begin) * kBlock * kBlock, n);
        }

        // Computes the sums of a group, over part of a slice or whole slices, while the previous group is scaled.
        template <int R>
        void group_sums(const uint8_t* a, const uint8_t* b, int rows, int64_t group, int64_t slices, Sum* sums) {
            if (m_.per_slice_ > 1) {
                scaling_.divide(kBytes);
                engine_.template step<R>(a, b, rows, static_cast<int>(group % m_.per_slice_ * m_.quads()), sums, scaling_);
            } else {
                scaling_.divide(static_cast<int>(slices));
                engine_.template multiply<R>(a, b, rows, slices, sums, false, scaling_);
            }
            scaling_.end();
        }

        void finish(int64_t block, const Side& lhs, Sum* sums, int64_t n) {
            const int rows = m_.rows_of(block), columns = columns_of(n);
            centered(job_, sums, 0, rows, lhs, *columns_, job_.p.k);
            if constexpr (kInteger) {
                if (job_.p.output.bias_format == HOP_INT32)
                    for (int i = 0; i < rows; ++i)
                        for (int j = 0; j < columns; ++j)
                            sums[i * kBlock + j] = static_cast<int32_t>(
                                static_cast<uint32_t>(sums[i * kBlock + j]) +
                                static_cast<uint32_t>(static_cast<const int32_t*>(job_.bias)[n * kBlock + j]));
                if (job_.p.output.format == HOP_INT32) {
                    for (int i = 0; i < rows; ++i)
                        store_elements(job_, static_cast<int32_t*>(job_.output) + (block * kBlock + i) * job_.p.output.row_stride + n * kBlock,
                                       sums + i * kBlock, columns);
                    return;
                }
            }
            const bool biased = is_biased();
            if (m_.gives_codes())
                return requantize_rows(job_, sums, lhs.scale, columns_->scale, biased ? bias_ : nullptr, block * kBlock,
                                       rows, n * kBlock, columns);
            finish_rows<Sum>(job_, {sums, rows, columns, lhs.scale, columns_->scale, biased ? bias_ : nullptr, block * kBlock, n * kBlock});
        }

        void store(int64_t block, float* y, int64_t n) {
            const int rows = m_.rows_of(block), columns = columns_of(n);
            const bool biased = is_biased();
            if (m_.gives_codes()) {
                float ones[kBlock];
                for (float& one : ones) one = 1.f;
                return requantize_rows(job_, y, ones, ones, biased ? bias_ : nullptr, block * kBlock, rows, n * kBlock, columns);
            }
            finish_rows<float>(job_, {y, rows, columns, nullptr, nullptr, biased ? bias_ : nullptr, block * kBlock, n * kBlock});
        }

        bool is_biased() const {
            return job_.p.output.bias_format != HOP_NONE && job_.p.output.bias_format != HOP_INT32;
        }
        int columns_of(int64_t n) const {
            const int64_t rest = job_.p.n - n * kBlock;
            return static_cast<int>(rest < kBlock ? rest : kBlock);
        }

        Multiplication& m_;
        const Job& job_;
        Engine engine_;
        Words words_;
        BlockScales scales_, folds_;
        uint8_t* tiles_ = nullptr;
        Sum* sums_ = nullptr;
        float* y_ = nullptr;
        Side* columns_ = nullptr;
        Scaling scaling_;
        alignas(64) float bias_[kBlock];
        int64_t sides_;
        bool few_ = false;
    };

    bool gives_codes() const { return job_.p.output.format == HOP_INT8 || job_.p.output.format == HOP_UINT8; }
    int quads() const { return job_.grouped() && per_slice_ > 1 ? kQuads / per_slice_ : kQuads; }
    int64_t chunk_groups() const { return ceil_div(chunk_ * kSlice, job_.group); }
    int64_t group_at(int64_t first, int64_t slice, int quad) const {
        return job_.grouped() ? ((first + slice) * kSlice + quad * 4) / job_.group - first * kSlice / job_.group : 0;
    }
    const Side* side_of(int64_t block, int64_t group) const { return lhs_sides_ + block * sides_ + (sides_ > 1 ? group : 0); }
    const uint8_t* tiles_of(int64_t block) const { return reinterpret_cast<const uint8_t*>(lhs_) + block * block_bytes_; }

    // The address of a panel's codes, and the bytes of one of its slices, if they are contiguous.
    const void* source(int64_t n, int64_t slice) const {
        const hop_operand& o = job_.p.rhs;
        if (made_) return made_of(n, slice);
        if (o.layout != HOP_TILED) return nullptr;
        return static_cast<const uint8_t*>(job_.rhs.codes) + (n * job_.slices + slice) * source_bytes();
    }
    uint8_t* made_of(int64_t n, int64_t slice) const { return made_ + ((n - strip_) * job_.slices + slice) * 2 * kUnit; }
    int64_t source_bytes() const { return made_ ? 2 * kUnit : is_narrow(job_.p.rhs.format) ? kTile : 2 * kTile; }

    void make_tile(const Words& words, BlockScales& folds, int64_t first, int64_t slice, uint8_t* out) {
        if constexpr (OwnTiles<Engine>::value) {
            Engine::rhs_tile(job_, folds, first, slice, out);
        } else if constexpr (kInteger) {
            const int format = job_.p.rhs.format;
            if (format == HOP_INT4 && job_.p.rhs.layout == HOP_TILED)
                return widen_tile(tile_in_panel(job_.p.rhs, job_.rhs.codes, job_.p.k, first, slice), 8, out);
            const uint8_t* codes = tile_of_codes(job_.p.rhs, job_.rhs.codes, job_.p.n, job_.p.k, first, slice, out);
            if (codes == out && (format == HOP_INT8 || format == HOP_UINT4)) return;
            for (int i = 0; i < kTile; i += 64) to_int8(format, codes + i, out + i);
            for (int64_t k = job_.p.k - slice * kSlice; format == HOP_UINT8 && k < kSlice; ++k)  // code 0 does not represent 0 here
                for (int row = 0; row < kRows; ++row) out[(k / 4 * kRows + row) * 4 + k % 4] = 0;
        } else {
            tile_of_words(job_, words, folds, first, slice, out);
        }
    }

    Job& job_;
    int64_t chunk_, block_bytes_, slab_;
    int64_t sides_;  // per row block: 1 if all groups have the same
    int per_slice_ = 1;
    bool ready_, lhs_zero_, rhs_zero_;
    bool kept_ = false;  // whether sums of groups stay in registers
    char* lhs_ = nullptr;
    uint8_t* made_ = nullptr;  // tiles of a strip of panels, from strip_ on, if made in advance
    int64_t strip_ = 0;
    Side* lhs_sides_ = nullptr;
};
