// All elements, some steps of them at a time. Included in a namespace (isa.h), after run.h.

static int update(const hop_update& u, int threads) {
    const int64_t parts = divide_up(u.count, kStep);
    const int used = worth(threads, u.count, kLarge / 4);
    Queue queue(parts, grain_of(parts, kStep, used));
    parallel(used, [&](int, int) {
        Lines lines;
        for (int64_t i, end; queue.take(i, end);) {
            const int64_t last = least(end * kStep, u.count);
            for (int64_t at = update_quickly(u, i * kStep, last, lines); at < last; at += kStep)
                update_part(u, at, least(kStep, last - at), lines);
        }
    });
    return HOP_OK;
}
