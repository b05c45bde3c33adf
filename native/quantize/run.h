// Quantizes a tensor, strip by strip. Included in a namespace (isa.h), after strip.h.

// Quantizes one strip with several threads.
static int quantize_together(const QuantizeCall& c, const Loops& loops, const Strip& s, const TwoLevel* outer, int threads) {
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
                loops.measure(c, s, units[i], own);
                if (!own.known) known = false;
            }
        });
        for (int64_t i = 0; i < count; ++i) {
            Stats own = Stats::at(memory + each * size_t(i), blocks);
            own.known = known;
            merge(own, s.count, c.q.rule, room.stats);
        }
    }
    find_factors(c, loops, s, outer, room);
    Queue queue(count);
    parallel(threads, [&](int, int) {
        for (int64_t i, end; queue.take(i, end);) encode_unit(c, loops, s, units[i], room.factors, room.stats.known);
    });
    return HOP_OK;
}

// ---- HOP_TWO_LEVEL

static float amax_of_tensor(const QuantizeCall& c, const Loops& loops, int threads) {
    const hop_blocks& g = c.blocks;
    const int64_t per_row = divide_up(g.cols, kLarge), count = g.batch * g.rows * per_row;
    std::atomic<uint32_t> most{0};
    Queue queue(count, grain_of(count, least(g.cols, kLarge), threads));
    parallel(threads, [&](int, int) {
        float own = 0;
        for (int64_t i, end; queue.take(i, end);) {
            for (; i < end; ++i) {
                const int64_t begin = i % per_row * kLarge;
                const auto* x = static_cast<const char*>(c.x) + (i / per_row * g.row_stride + begin) * loops.bytes;
                const float found = loops.amax(x, least(kLarge, g.cols - begin));
                own = found > own ? found : own;
            }
        }
        for (uint32_t seen = most; bits_of(own) > seen && !most.compare_exchange_weak(seen, bits_of(own));) {
        }
    });
    return float_of(most);
}

// ---- tensors

// Quantizes strips, one thread each; `outer` is nullptr if each row has a global_amax.
static int quantize_strips(const QuantizeCall& c, const Loops& loops, const Strips& strips, const TwoLevel* outer, int threads) {
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
                    quantize_strip(c, loops, strips[i], outer, room);
                    continue;
                }
                float& amax = static_cast<float*>(c.second)[i];
                const auto* x = static_cast<const char*>(c.x) + i * g.row_stride * loops.bytes;
                amax = c.given_scale ? static_cast<const float*>(c.given_scale)[i] : loops.amax(x, g.cols);
                const TwoLevel own = two_level(c.q, amax);
                for (int64_t j = 0; j < strips.per_row; ++j)
                    quantize_strip(c, loops, strips[i * strips.per_row + j], &own, room);
            }
        }
    });
    return result;
}

static int quantize_tensor(const QuantizeCall& c, const Loops& loops) {
    const hop_blocks& g = c.blocks;
    const Strips strips(g);
    const int threads = worth(c.threads, g.batch * g.rows * g.cols, kLarge / 2);
    TwoLevel outer;
    if (c.q.rule == HOP_TWO_LEVEL && !c.q.outer_rows) {
        float& amax = *static_cast<float*>(c.second);
        amax = c.given_scale ? *static_cast<const float*>(c.given_scale) : amax_of_tensor(c, loops, threads);
        outer = two_level(c.q, amax);
    } else if (threads > 1 && strips.size() < 4 * threads && Units(strips[0]).size() > 1) {
        for (int64_t i = 0; i < strips.size(); ++i) {
            const int result = quantize_together(c, loops, strips[i], &outer, threads);
            if (result != HOP_OK) return result;
        }
        return HOP_OK;
    }
    return quantize_strips(c, loops, strips, &outer, threads);
}
