// The loops of convolutions. Included in a namespace (isa.h), after gemm.h; see convolution.h.
//
//     for each row group                      some lines of outputs of an example, or some examples: builds their image
//         for some row blocks                 all of them if the sum has many slices
//             for each panel                  of 32 outputs, in a share of all panels
//                 for each chunk              if there are many slices; sums are kept in memory between chunks
//                     for each row block      an engine multiplies 32 pixels by 32 outputs
//
// With windows, the engine reads rows at any address,
//
//     template <int R> windows(a, row_stride, rows, steps, count, b, sums, add, ahead)
//     kWhole                                  whether it reads R · 16 rows for any value of `rows`
//
// where `steps` contains the offsets of the slices. Without windows, it reads tiles of lhs as products do.

template <class Engine, bool Windows>
class Convolving {
public:
    explicit Convolving(Convolution& c) : c_(c) {
        lhs_zero_ = c.job.p.lhs.zero_format != HOP_NONE || zero(0) != 0;
        const hop_operand& lhs = c.job.p.lhs;
        by_example_ = ((lhs.scale.format != HOP_NONE || lhs.zero_format != HOP_NONE) && lhs.scale.row_stride != 0) ||
                      (gives_codes(c.job) && c.job.p.output.scale_row_stride != 0);
        past_ = c.c.channels_last && result_bytes(c.job) * c.c.outputs * c.pixels * c.batch > kPastBytes;
        const int64_t chunks = ceil_div(c.slices, kMostSlices);
        const int64_t row = c.inputs * (c.taps < 3 ? c.taps : 3);  // approximate elements read for each pixel
        at_once_ = c.depthwise ? 4 : c.units > 1 && !c.windows ? 0 : kRowsBytes / (kBlock * row);
        chunk_ = c.depthwise || c.slices <= kMostSlices + kMostSlices / 4 ? c.slices : ceil_div(c.slices, chunks);
        if (chunk_ < c.slices) at_once_ = 0;
        else if (at_once_ < 1) at_once_ = 1;
    }

    int run() {
        static thread_local Scratch made;
        const int64_t panels = c_.units * c_.panels, all = c_.depthwise ? panels : panels * c_.slices * 2;
        const int64_t each = c_.depthwise ? c_.slices * kTapBytes : kTile;
        const uint8_t* tiles = static_cast<const uint8_t*>(c_.job.rhs.codes);
        uint8_t* own = nullptr;
        if (!c_.is_ready()) {
            own = reinterpret_cast<uint8_t*>(made.get(static_cast<size_t>(all * each)));
            if (!own) return HOP_NO_MEMORY;
            tiles = own;
        }
        const int threads = worth(c_.job.threads, c_.row_groups * c_.blocks * panels * (c_.slices + 4), 100);
        const int64_t channels = c_.inputs / kSlice;  // in slices
        const bool by_taps = is_by_taps(c_);
        Queue packing(own ? by_taps ? panels * 2 * channels : all : 0, by_taps ? 1 : 16);
        Parts items(c_.row_groups * c_.shares, threads);
        Barrier packed;
        std::atomic<int> error{HOP_OK};
        parallel(threads, [&](int thread, int team) {
            int64_t begin, end;
            if (own) {
                while (packing.take(begin, end))
                    for (int64_t i = begin; i < end; ++i) {
                        if (c_.depthwise) depthwise_weight(c_, i, reinterpret_cast<int8_t*>(own + i * each));
                        else if (by_taps)
                            weight_by_taps(c_, i / (2 * channels), static_cast<int>(i / channels % 2), i % channels, own);
                        else
                            weight_tile(c_, i / (2 * c_.slices), static_cast<int>(i % 2), i / 2 % c_.slices,
                                        own + i * each);
                    }
                packed.wait(team);
            }
            Worker worker(*this, tiles);
            if (!worker.ready()) {
                error = HOP_NO_MEMORY;
                return;
            }
            for (int64_t item; (item = items.take(thread)) >= 0;) worker.item(item / c_.shares, item % c_.shares);
            worker.flush();
            if (past_) fence();
        });
        made.trim();
        return error;
    }

private:
    static constexpr int64_t kPastBytes = 4 << 20;  // results of this size exceed all second-level caches
    static constexpr int64_t kMostSlices = 16;  // slices of a chunk: the panel's tiles stay in the first-level cache
    static constexpr int64_t kRowsBytes = 24 << 10;
    using Sum = int32_t;
    static constexpr int kLhsUnit = Engine::kLhsBytes * kTile;

    int32_t zero(int64_t example) const {  // of the codes as they are multiplied
        if (c_.depthwise) return static_cast<int32_t>(c_.zero(example)) + (c_.job.p.lhs.format == HOP_INT8 ? 128 : 0);
        if (Windows) return static_cast<int32_t>(c_.zero(example));
        int32_t zero;
        load_zeros(c_.job.p.lhs, c_.job.lhs.zero, example, 1, 0, &zero);
        return zero + c_.job.shift;
    }

    // A block that has been multiplied, but not stored.
    struct Pending {
        const Columns* columns;
        const Sum* sums;
        const int64_t* at;
        char* output;
        int rows, done;
    };

    class Worker {
    public:
        Worker(Convolving& all, const uint8_t* tiles)
            : all_(all),
              c_(all.c_),
              engine_(kRows, kQuads),
              pixels_(all.c_),
              tiles_(tiles),
              panels_(c_.units * c_.panels) {
            const int64_t area = kBlock * kBlock * 4, sums = all.chunk_ < c_.slices ? c_.blocks : 2;
            const int64_t steps = c_.windows ? c_.taps * (c_.inputs / kSlice) : c_.slices;
            Need needs[16] = {{&sums_, sums * area}, {&aside_, c_.c.channels_last ? 0 : area},
                              {&steps_, steps * int64_t(sizeof(Step))},
                              {&columns_, (panels_ / c_.shares + 1) * int64_t(sizeof(Columns))}};
            int needed = 4;
            pixels_.need([&](const Need& n) { needs[needed++] = n; });
            int64_t bytes = 0;
            for (int i = 0; i < needed; ++i) bytes += ceil_div(needs[i].bytes, 64) * 64;
            static thread_local Scratch memory;
            scratch_ = &memory;
            char* p = memory.get(static_cast<size_t>(bytes));
            if (!p) return;
            for (int i = 0; i < needed; ++i) {
                *static_cast<char**>(needs[i].pointer) = p;
                p += ceil_div(needs[i].bytes, 64) * 64;
            }
            ready_ = true;
            c_.lhs_steps(steps_);
            pixels_.begin();
        }
        ~Worker() { scratch_->trim(); }
        bool ready() const { return ready_; }
        void flush() { store(kBlock); }

        void item(int64_t row_group, int64_t share) {
            if (row_group != group_) {
                flush();
                pixels_.take(row_group);
                group_ = row_group, unit_ = c_.windows ? 0 : -1;
            }
            const int64_t first = panels_ * share / c_.shares, last = panels_ * (share + 1) / c_.shares;
            if (first != first_panel_) {
                flush();
                first_panel_ = first;
                described_ = first;
            }
            const int64_t at_once = all_.at_once_ > 0 ? all_.at_once_ : pixels_.count();
            for (int64_t begin = 0; begin < pixels_.count(); begin += at_once) {
                const int64_t end = begin + at_once < pixels_.count() ? begin + at_once : pixels_.count();
                Ahead ahead = rows_ahead(end, (last - first) * (end - begin) * c_.slices);
                for (int64_t panel = first; panel < last; ++panel) {
                    if (panel == described_) describe(described_++, columns_[panel - first]);  // its tiles are next
                    if (unit_ != panel / c_.panels) {
                        unit_ = panel / c_.panels;
                        if (!c_.windows && !c_.depthwise) pixels_.gather(unit_);
                    }
                    multiply(panel, begin, end, ahead);
                }
            }
        }

    private:
        // Prefetches the memory that the next blocks read in place.
        Ahead rows_ahead(int64_t block, int64_t steps) const {
            if (!c_.windows || !c_.borrowed || block >= pixels_.count()) return Ahead(nullptr, 0, 1);
            const int64_t rest = pixels_.count() - block, blocks = rest < all_.at_once_ ? rest : all_.at_once_;
            return Ahead(pixels_.block(block).at, blocks * kBlock * c_.row_at, steps);
        }

        void multiply_depthwise(int64_t panel, int64_t begin, int64_t end) {
            const auto* weight = reinterpret_cast<const int8_t*>(tiles_ + panel * c_.slices * kTapBytes);
            for (int64_t b = begin; b < end; ++b) {
                const Rows& block = pixels_.block(b);
                Sum* sums = sums_ + turn_++ % 2 * kBlock * kBlock;
                depthwise_rows(pixels_.lie_at(block), panel * kBlock, block.count, pixels_.tap_offsets(), c_.slices,
                               c_.job.p.lhs.format == HOP_INT8, weight, sums);
                finish(block, sums, columns_[panel - first_panel_]);
            }
        }

        void multiply(int64_t panel, int64_t begin, int64_t end, Ahead& ahead) {
            if (c_.depthwise) return multiply_depthwise(panel, begin, end);
            const uint8_t* b = tiles_ + panel * c_.slices * 2 * kTile;
            const bool kept = all_.chunk_ < c_.slices && end - begin > 1;
            const int64_t chunk = kept ? all_.chunk_ : c_.slices;
            for (int64_t s = 0; s < c_.slices; s += chunk) {
                const int64_t count = c_.slices - s < chunk ? c_.slices - s : chunk;
                for (int64_t i = begin; i < end; ++i) {
                    Sum* sums = sums_ + (kept ? i : turn_++ % 2) * kBlock * kBlock;
                    const Rows& block = pixels_.block(i);
                    if (block.count > kRows) engine<2>(block, b, s, count, sums, ahead);
                    else engine<1>(block, b, s, count, sums, ahead);
                    if (s + count == c_.slices) finish(block, sums, columns_[panel - first_panel_]);
                }
            }
        }

        template <int R>
        void engine(const Rows& block, const uint8_t* b, int64_t s, int64_t count, Sum* sums, Ahead& ahead) {
            if constexpr (Windows) {
                const int each = static_cast<int>(ceil_div(kBlock, count));
                engine_.template windows<R>(block.at + (c_.windows ? unit_ * c_.inputs : 0),
                                            c_.windows ? c_.row_at : c_.row_stride(), block.count, steps_ + s, count, b, sums, s > 0,
                                            [&] {
                                                ahead();
                                                store(each);
                                            });
            } else {
                engine_.template multiply<R>(block.at + s * R * kLhsUnit, b + s * 2 * kTile, block.count, count, sums,
                                             s > 0, ahead);
            }
        }

        // Computes the data of the columns of a panel.
        void describe(int64_t panel, Columns& columns) {
            const int64_t first = panel % c_.panels * kBlock;
            columns.first = panel / c_.panels * c_.outputs + first;
            columns.count = static_cast<int>(c_.outputs - first < kBlock ? c_.outputs - first : kBlock);
            columns.example = -1;
            columns.past = all_.past_ && columns.count == kBlock;
            std::memset(columns.scale, 0, sizeof(columns.scale));
            load_scales(c_.job.p.rhs.scale, c_.job.rhs.scale, columns.first, columns.count, 0, columns.scale);
            load_bias(c_.job, columns.first, columns.count, columns.bias);
            std::memset(columns.sum, 0, sizeof(columns.sum));
            if (!all_.lhs_zero_) return;
            if (c_.depthwise)
                return add_depthwise(reinterpret_cast<const int8_t*>(tiles_ + panel * c_.slices * kTapBytes), c_.slices,
                                     columns.sum);
            const uint8_t* tile = tiles_ + panel * c_.slices * 2 * kTile;
            for (int half = 0; half < 2; ++half)
                add_quads(tile + half * kTile, kQuads, c_.slices, 2 * kTile, columns.sum + half * kRows);
        }

        // Updates the data for an example, if it differs between examples.
        void describe_for(int64_t example, Columns& columns) const {
            if (columns.example == example || (columns.example >= 0 && !all_.by_example_)) return;
            columns.example = example;
            const auto zero = static_cast<uint32_t>(all_.zero(example));
            const auto* bias = c_.job.p.output.bias_format == HOP_INT32
                                   ? static_cast<const int32_t*>(c_.job.bias) + columns.first
                                   : nullptr;
            for (int j = 0; j < kBlock; ++j) {
                uint32_t less = zero * static_cast<uint32_t>(columns.sum[j]);
                if (bias && j < columns.count) less -= static_cast<uint32_t>(bias[j]);
                columns.less[j] = static_cast<int32_t>(less);
            }
            columns.biased = c_.job.p.output.bias_format != HOP_NONE && !bias;
            load_scales(c_.job.p.lhs.scale, c_.job.lhs.scale, example, 1, 0, &columns.lhs);
            find_finite(columns);
            if (!gives_codes(c_.job)) return;
            load_target(c_.job, example, columns.first, columns.count, columns.target);
            load_factors(c_.job.p.output, columns.lhs, columns.scale, columns.biased ? columns.bias : nullptr, columns.target);
            find_factors(c_.job.p.output, static_cast<double>(c_.job.p.k) * (255 * 128), columns);
        }

        // Stores the rows of a block while the next one is multiplied: a few after each step.
        void finish(const Rows& block, const Sum* sums, Columns& columns) {
            flush();
            describe_for(block.example, columns);
            const int64_t size = result_bytes(c_.job);
            pending_ = {&columns, sums, pixels_.stored_at(block), static_cast<char*>(c_.job.output), block.count, 0};
            if (c_.c.channels_last) {
                pending_.output += columns.first * size;
            } else {
                pending_.output += columns.first * c_.pixels * size;
                for (int i = 0; i < block.count; ++i) rows_aside_[i] = pending_.at[i] < 0 ? -1 : i * kBlock;
            }
            if (!Windows) flush();
        }
        void store(int count) {
            if (pending_.done >= pending_.rows) return;
            const Pending& p = pending_;
            const int64_t* at = c_.c.channels_last ? p.at : rows_aside_;
            const int here = p.rows - p.done < count ? p.rows - p.done : count;
            store_rows(c_.job.p.output, *p.columns, p.sums + p.done * kBlock, here, at + p.done,
                       c_.c.channels_last ? p.output : aside_);
            pending_.done += here;
            if (c_.c.channels_last || p.done < p.rows) return;
            switch (c_.job.p.output.format) {
                case HOP_FLOAT32: case HOP_INT32: return turn<uint32_t>();
                case HOP_INT8: case HOP_UINT8: return turn<uint8_t>();
                default: return turn<uint16_t>();
            }
        }

        // Copies a finished block to an output in which pixels are adjacent.
        template <class T>
        void turn() const {
            constexpr int kSide = 16 / sizeof(T);
            const T* in = reinterpret_cast<const T*>(aside_);
            alignas(64) T lines[kBlock * kBlock];
            for (int i = 0; i < pending_.rows; i += kSide)
                for (int j = 0; j < kBlock; j += kSide)
                    transpose_square(in + i * kBlock + j, kBlock, lines + j * kBlock + i, kBlock, kSide);
            const int64_t* at = pending_.at;
            for (int first = 0, last; first < pending_.rows; first = last) {  // runs of adjacent pixels
                for (last = first + 1; last < pending_.rows && at[first] >= 0 && at[last] == at[last - 1] + 1;) ++last;
                if (at[first] < 0) continue;
                T* out = reinterpret_cast<T*>(pending_.output) + at[first];
                const T* line = lines + first;
                for (int j = 0; j < pending_.columns->count; ++j, line += kBlock, out += c_.pixels) {
                    if (last - first == kBlock) std::memcpy(out, line, sizeof(T) * kBlock);
                    else std::memcpy(out, line, sizeof(T) * static_cast<size_t>(last - first));
                }
            }
        }

        Convolving& all_;
        const Convolution& c_;
        Engine engine_;
        Pixels<Engine, Windows> pixels_;
        const uint8_t* tiles_;
        int64_t panels_, group_ = -1, unit_ = -1;
        Scratch* scratch_ = nullptr;
        char* aside_ = nullptr;
        Sum* sums_ = nullptr;
        Columns* columns_ = nullptr;  // for the panels of a share
        Step* steps_ = nullptr;
        Pending pending_ = {};
        int64_t rows_aside_[kBlock];
        int64_t first_panel_ = -1, described_ = -1, turn_ = 0;  // described_: the next panel without data
        bool ready_ = false;
    };

    Convolution& c_;
    bool lhs_zero_, by_example_, past_;
    int64_t chunk_, at_once_;  // slices of a chunk, and blocks that stay in the first-level cache; 0: all blocks
};
