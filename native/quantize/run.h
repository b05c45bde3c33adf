// A tensor, strip by strip. Included in a namespace (isa.h), after strip.h.

// A strip by several threads.
template <class T>
static int quantize_together(const QuantizeCall& c, const Strip& s, const TwoLevel* outer, int threads) {
    const Units units(s);
    const int64_t count = units.size(), blocks = Room::padded(s.count);
    const size_t each = Stats::bytes(blocks);
    char* memory = scratch(each * size_t(count) + Room::bytes(s.count));
    if (!memory) return HOP_NO_MEMORY;
    Room room(memory + each * size_t(count), s.count, c.q.affine);
    room.stats.clear(s.count, c.q.rule);
    if (measures(c)) {
        std::atomic<bool> known{true};
        Queue queue(count);
        parallel(threads, [&](int, int) {
            for (int64_t i, end; queue.take(i, end);) {
                Stats own = Stats::at(memory + each * size_t(i), blocks);
                own.clear(s.count, c.q.rule);
                measure<T>(c, s, units[i], own);
                if (!own.known) known = false;
            }
        });
        for (int64_t i = 0; i < count; ++i) {
            Stats own = Stats::at(memory + each * size_t(i), blocks);
            own.known = known;
            merge(own, s.count, c.q.rule, room.stats);
        }
    }
    find_factors<T>(c, s, outer, room);
    Queue queue(count);
    parallel(threads, [&](int, int) {
        for (int64_t i, end; queue.take(i, end);) encode_unit<T>(c, s, units[i], room.factors, room.stats.known);
    });
    return HOP_OK;
}

// ---- HOP_TWO_LEVEL

template <class T>
static float amax_of_row(const QuantizeCall& c, int64_t row, int64_t begin, int64_t end) {
    bool known = true;
    const auto* x = static_cast<const typename T::Word*>(c.x) + row * c.blocks.row_stride;
#if defined(HOP_IN_AVX2)
    constexpr int64_t some = 512, ahead = 1024;  // elements, whose lines a CPU fetches too late by itself
    float most = 0;
    for (int64_t i = begin; i < end; i += some) {
        for (int64_t line = 0; line < some; line += 32) fetch(x + i + ahead + line);
        const float own = amax_of<T>(x + i, least(some, end - i), known);
        most = own > most ? own : most;
    }
    return most;
#else
    return amax_of<T>(x + begin, end - begin, known);
#endif
}

template <class T>
static float amax_of_tensor(const QuantizeCall& c, int threads) {
    const int64_t per_row = divide_up(c.blocks.cols, kLarge), count = c.blocks.batch * c.blocks.rows * per_row;
    std::atomic<uint32_t> most{0};
    Queue queue(count, grain_of(count, least(c.blocks.cols, kLarge), threads));
    parallel(threads, [&](int, int) {
        float own = 0;
        for (int64_t i, end; queue.take(i, end);) {
            for (; i < end; ++i) {
                const int64_t begin = i % per_row * kLarge;
                const float found = amax_of_row<T>(c, i / per_row, begin, least(begin + kLarge, c.blocks.cols));
                own = found > own ? found : own;
            }
        }
        for (uint32_t seen = most; bits_of(own) > seen && !most.compare_exchange_weak(seen, bits_of(own));) {
        }
    });
    return float_of(most);
}

// ---- all

// Strips by one thread each; `outer` is nullptr where each row has its own.
template <class T>
static int quantize_strips(const QuantizeCall& c, const Strips& strips, const TwoLevel* outer, int threads) {
    const hop_blocks& g = c.blocks;
    const bool by_rows = c.q.rule == HOP_TWO_LEVEL && c.q.outer_rows;
    const int64_t cols = by_rows ? g.cols : least(g.cols, strips.width * g.tile_cols),
                  size = cols * least(g.tile_rows, g.rows);
    std::atomic<int> result{HOP_OK};
    const int64_t items = by_rows ? g.batch * g.rows : strips.size();
    Queue queue(items, grain_of(items, size, threads));
    parallel(threads, [&](int, int) {
        char* memory = scratch(Room::bytes(strips.width));
        if (!memory) {
            result = HOP_NO_MEMORY;
            return;
        }
        Room room(memory, strips.width, c.q.affine);
        for (int64_t i, end; queue.take(i, end);) {
            for (; i < end; ++i) {
                if (!by_rows) {
                    quantize_strip<T>(c, strips[i], outer, room);
                    continue;
                }
                float& amax = static_cast<float*>(c.second)[i];
                amax = c.given_scale ? static_cast<const float*>(c.given_scale)[i] : amax_of_row<T>(c, i, 0, g.cols);
                const TwoLevel own = two_level(c.q, amax);
                for (int64_t j = 0; j < strips.per_row; ++j)
                    quantize_strip<T>(c, strips[i * strips.per_row + j], &own, room);
            }
        }
    });
    return result;
}

template <class T>
static int quantize_tensor(const QuantizeCall& c) {
    const hop_blocks& g = c.blocks;
    const Strips strips(g);
    const int threads = worth(c.threads, g.batch * g.rows * g.cols, kLarge / 2);
    TwoLevel outer;
    if (c.q.rule == HOP_TWO_LEVEL && !c.q.outer_rows) {
        float& amax = *static_cast<float*>(c.second);
        amax = c.given_scale ? *static_cast<const float*>(c.given_scale) : amax_of_tensor<T>(c, threads);
        outer = two_level(c.q, amax);
    } else if (threads > 1 && strips.size() < 4 * threads && Units(strips[0]).size() > 1) {
        for (int64_t i = 0; i < strips.size(); ++i) {
            const int result = quantize_together<T>(c, strips[i], &outer, threads);
            if (result != HOP_OK) return result;
        }
        return HOP_OK;
    }
    return quantize_strips<T>(c, strips, &outer, threads);
}
