// Attention, one block of score rows at a time. Included in a namespace (isa.h), after probabilities.h.

// The layout of a thread's memory for one head of keys and values and one block of rows.
struct AttentionRoom {
    static constexpr int kMost = 24;  // maximum rows of a block; kScores: bytes of their scores, which fit in L2
    static constexpr int64_t kScores = 1 << 18;
    int rows;
    int64_t quads_of_keys, lines, quads_of_values;  // lines of kLanes tokens; quads_of_values of kTogether tokens
    int64_t apart;  // row pitch of scores and weights: not a power of two, to avoid cache set conflicts
    size_t sizes[8], size = 0;
    uint8_t *keys = nullptr, *values = nullptr;
    RowCode *queries = nullptr, *weights = nullptr;
    int32_t *corrections = nullptr, *sums = nullptr;
    float *scores = nullptr, *scales = nullptr;
    bool invalid = false;  // whether a scale of the values is infinite or NaN

    explicit AttentionRoom(const hop_attention& a) {
        quads_of_keys = divide_up(a.width, kTogether);
        lines = divide_up(line_count(a.keys), kLinesAtOnce) * kLinesAtOnce;
        quads_of_values = lines * kLanes / kTogether;
        apart = lines * kLanes + 64;
        const int64_t tokens = lines * kLanes, all_rows = a.queries * (a.heads / a.key_heads);
        rows = int(least(kMost, kScores / (tokens * 4) / kRowsAtOnce * kRowsAtOnce));
        if (rows < kRowsAtOnce) rows = kRowsAtOnce;
        rows = int(least(rows, all_rows));
        const int64_t channels = value_lines(a) * kLanes;
        const int64_t bytes[8] = {lines * quads_of_keys * kLine, value_lines(a) * quads_of_values * kLine, rows * quads_of_keys * 4,
                                  rows * apart * int64_t(sizeof(RowCode)), tokens * 4, rows * channels * 4,
                                  rows * apart * 4, 2 * tokens * 4 + channels * 4};
        for (int i = 0; i < 8; ++i) size += sizes[i] = size_t(divide_up(bytes[i], 64) * 64);
    }
    static int64_t value_lines(const hop_attention& a) { return divide_up(line_count(a.value_width), kLinesAtOnce) * kLinesAtOnce; }
    void place(char* memory) {
        char* parts[8];
        for (int i = 0; i < 8; ++i) parts[i] = memory, memory += sizes[i];
        keys = reinterpret_cast<uint8_t*>(parts[0]), values = reinterpret_cast<uint8_t*>(parts[1]);
        queries = reinterpret_cast<RowCode*>(parts[2]), weights = reinterpret_cast<RowCode*>(parts[3]);
        corrections = reinterpret_cast<int32_t*>(parts[4]), sums = reinterpret_cast<int32_t*>(parts[5]);
        scores = reinterpret_cast<float*>(parts[6]), scales = reinterpret_cast<float*>(parts[7]);
    }
    float* logs() const { return scales + lines * kLanes; }  // logarithms of the scales of values
    float* channels() const { return scales + 2 * lines * kLanes; }
};

// One row of a block: its position, and the number of keys that it may see.
struct AttentionRow {
    int64_t head, query, keys;
    float scale;
};

// Returns the number of keys that a row may see: up to the last one that a boolean mask keeps. `mask` is the start of
// its row.
static int64_t seen(const uint8_t* mask, int64_t keys) {
    constexpr int64_t word = sizeof(uint64_t);
    for (; keys >= word; keys -= word) {
        uint64_t own;
        std::memcpy(&own, mask + keys - word, word);
        if (own) break;
    }
    while (keys && !mask[keys - 1]) --keys;
    return keys;
}

static AttentionRow row_of(const AttentionCall& c, int64_t batch, int64_t head, int64_t query) {
    const hop_attention& a = c.a;
    const float* scale = c.q_scale + batch * a.q_scale_stride[0] + head * a.q_scale_stride[1];
    AttentionRow r{head, query, a.is_causal ? least(query + 1, a.keys) : a.keys, scale[query * a.q_scale_stride[2]] * a.scale};
    if (a.mask == HOP_MASK_BOOL)
        r.keys = seen(static_cast<const uint8_t*>(c.mask) + batch * a.mask_stride[0] + head * a.mask_stride[1] + query * a.mask_stride[2], r.keys);
    return r;
}

// ---- products

// Multiplies the first `count` quads of a line of `quads_of` quads.
template <int N>
HOP_INLINE void multiply(const RowCode* a, int64_t stride, const uint8_t* b, int64_t count, int64_t quads_of,
                         Ints (&sums)[N][kLinesAtOnce]) {
    HOP_UNROLL_BY_TWO
    for (int64_t c = 0; c < count; ++c) {
        Quads y[kLinesAtOnce];
        HOP_UNROLL
        for (int p = 0; p < kLinesAtOnce; ++p) y[p] = quads(b + (p * quads_of + c) * kLine);
        HOP_UNROLL
        for (int i = 0; i < N; ++i) {
            const Four x = four(a + i * stride + kTogether * c);
            HOP_UNROLL
            for (int p = 0; p < kLinesAtOnce; ++p) sums[i][p] = dot(sums[i][p], x, y[p]);
        }
    }
}

// ---- scores

// Adds the mask to the scores of keys j to j + kLanes - 1.
HOP_INLINE Floats masked(const AttentionCall& c, Floats x, int64_t at, int64_t j) {
    const int64_t there = least(kLanes, c.a.keys - j);
    if (c.a.mask == HOP_MASK_FLOAT) {
        float part[kLanes] = {};
        const float* from = static_cast<const float*>(c.mask) + at + j;
        if (there < kLanes) std::memcpy(part, from, size_t(there) * sizeof(float)), from = part;
        return x + load_as<Floats>(from);
    }
    uint8_t part[kLanes] = {};
    const uint8_t* from = static_cast<const uint8_t*>(c.mask) + at + j;
    if (there < kLanes) std::memcpy(part, from, size_t(there)), from = part;
    return ints_from(from) != 0 ? x : all(-infinity());
}

// Masks scores of a row from key j on, if a mask applies or the row does not see all keys.
static HOP_ALONE void hide(const AttentionCall& c, int64_t batch, const AttentionRow& r, int64_t j, Floats (&x)[kLinesAtOnce]) {
    for (int p = 0; p < kLinesAtOnce; ++p) {
        const int64_t at = j + p * kLanes;
        if (c.a.mask && at < c.a.keys)
            x[p] = masked(c, x[p], batch * c.a.mask_stride[0] + r.head * c.a.mask_stride[1] + r.query * c.a.mask_stride[2], at);
        if (at + kLanes > r.keys) x[p] = counted() < int32_t(r.keys - at) ? x[p] : all(-infinity());
    }
}

// The largest score, the largest score plus log of the value's scale, and whether there is a NaN.
struct Extent {
    Floats most, top;
    Ints nan;
};

// Computes scores of rows `first` to `first + N - 1` and kLanes · kLinesAtOnce keys from j on, from their sums.
// `plain`: no mask applies.
template <int N>
HOP_INLINE void finish(const AttentionCall& c, const AttentionRoom& room, int64_t batch, const AttentionRow* row, int first, int64_t j,
                       bool plain, const Ints (&sums)[N][kLinesAtOnce], Extent* extents) {
    const bool per_token = c.a.per_token;
    const float *scales = room.scales + j, *logs = room.logs() + j;
    float* scores = room.scores + first * room.apart + j;
    Extent* const own = extents + first;
    Floats x[N][kLinesAtOnce];
    HOP_UNROLL
    for (int i = 0; i < N; ++i) {
        HOP_UNROLL
        for (int p = 0; p < kLinesAtOnce; ++p)
            x[i][p] = __builtin_convertvector(sums[i][p], Floats) * row[first + i].scale * load_as<Floats>(scales + p * kLanes);
    }
    if (__builtin_expect(!plain, 0)) {
        Floats hidden[N][kLinesAtOnce];
        std::memcpy(hidden, x, sizeof(x));
        for (int i = 0; i < N; ++i) hide(c, batch, row[first + i], j, hidden[i]);
        std::memcpy(x, hidden, sizeof(x));
    }
    HOP_UNROLL
    for (int i = 0; i < N; ++i) {
        Floats most = own[i].most;
        Ints nan = own[i].nan;
        HOP_UNROLL
        for (int p = 0; p < kLinesAtOnce; ++p) {
            most = larger(x[i][p], most);
            if (p % 2 == 0) nan |= either_nan(x[i][p], x[i][p + 1 < kLinesAtOnce ? p + 1 : p]);
            store_as(scores + i * room.apart + p * kLanes, x[i][p]);
        }
        own[i].most = most, own[i].nan = nan;
    }
    if (!per_token) return;
    HOP_UNROLL
    for (int i = 0; i < N; ++i) {
        Floats top = own[i].top;
        HOP_UNROLL
        for (int p = 0; p < kLinesAtOnce; ++p) top = larger(x[i][p] + load_as<Floats>(logs + p * kLanes), top);
        own[i].top = top;
    }
}

template <int N>
static HOP_ALONE void score(const AttentionCall& c, const AttentionRoom& room, int64_t batch, const AttentionRow* row, int first, int64_t j,
                            bool plain, Extent* extents) {
    const int64_t elements = room.quads_of_keys * kTogether;
    Ints sums[N][kLinesAtOnce];
    HOP_UNROLL
    for (int i = 0; i < N; ++i) {
        HOP_UNROLL
        for (int p = 0; p < kLinesAtOnce; ++p) sums[i][p] = load_as<Ints>(room.corrections + j + p * kLanes);
    }
    const uint8_t* lines = room.keys + j / kLanes * room.quads_of_keys * kLine;
    multiply<N>(room.queries + first * elements, elements, lines, room.quads_of_keys, room.quads_of_keys, sums);
    finish<N>(c, room, batch, row, first, j, plain, sums, extents);
}

#if defined(HOP_IN_AVX2)
static void score_few(const AttentionCall& c, const AttentionRoom& room, int64_t batch, const AttentionRow* row, int rows, int64_t j,
                      bool plain, Extent* extents) {
    const hop_attention& a = c.a;
    const int8_t* k = c.k + batch * a.k_stride[0] + row->head / (a.heads / a.key_heads) * a.k_stride[1];
    for (int i = 0; i < rows; ++i) {
        Ints sums[1][kLinesAtOnce];
        for (int p = 0; p < kLinesAtOnce; ++p) {
            const int8_t* tokens[kLanes];
            for (int t = 0; t < kLanes; ++t) tokens[t] = k + least(j + p * kLanes + t, a.keys - 1) * a.k_stride[2];
            sums[0][p] = dots_of_tokens(room.queries + i * a.width, tokens, a.width);
        }
        finish<1>(c, room, batch, row, i, j, plain, sums, extents);
    }
}

static void add_few(const AttentionCall& c, const AttentionRoom& room, int64_t batch, const AttentionRow* row, int rows, int64_t keys,
                    int64_t channels) {
    const hop_attention& a = c.a;
    const int8_t* v = c.v + batch * a.v_stride[0] + row->head / (a.heads / a.key_heads) * a.v_stride[1];
    for (int i = 0; i < rows; ++i) {
        const RowCode* weights = room.weights + i * room.apart;
        int32_t* sums = room.sums + i * channels;
        int64_t p = 0;
        for (; p + 64 <= a.value_width; p += 64) add_tokens<4>(weights, v + p, a.v_stride[2], least(keys, a.keys), sums + p);
        for (; p < a.value_width; p += 16) add_tokens<1>(weights, v + p, a.v_stride[2], least(keys, a.keys), sums + p);
    }
}
#else
static bool is_few(const hop_attention&) { return false; }
static void score_few(const AttentionCall&, const AttentionRoom&, int64_t, const AttentionRow*, int, int64_t, bool, Extent*) {}
static void add_few(const AttentionCall&, const AttentionRoom&, int64_t, const AttentionRow*, int, int64_t, int64_t) {}
#endif

// ---- a block of rows

template <class T>
static void store_row(const float* y, int64_t n, void* out, int64_t at) {
    auto* to = static_cast<typename T::Word*>(out) + at;
    for (int64_t i = 0; i < n; ++i) to[i] = T::narrow(y[i]);
}

static HOP_ALONE void store_any(const AttentionCall& c, const float* y, int64_t at) {
    switch (c.a.result_dtype) {
        case HOP_F32: return store_row<F32>(y, c.a.value_width, c.result, at);
        case HOP_BF16: return store_row<BF16>(y, c.a.value_width, c.result, at);
        default: return store_row<F16>(y, c.a.value_width, c.result, at);
    }
}

// Copies the queries of a block, with the offset added to their codes.
static HOP_ALONE void take_queries(const AttentionCall& c, const AttentionRoom& room, int64_t batch, const AttentionRow* row, int rows) {
    const int64_t elements = room.quads_of_keys * kTogether;
    for (int i = 0; i < rows; ++i) {
        const int8_t* from = c.q + batch * c.a.q_stride[0] + row[i].head * c.a.q_stride[1] + row[i].query * c.a.q_stride[2];
        RowCode* to = room.queries + i * elements;
        for (int64_t e = 0; e < c.a.width; ++e) to[e] = RowCode(from[e] + kOffset);
        for (int64_t e = c.a.width; e < elements; ++e) to[e] = 0;
    }
}

// Computes the weights of values in a row of scores, in steps of 1/255. Returns the factor of their sum.
static HOP_ALONE float weigh(const AttentionCall& c, const AttentionRoom& room, const Extent& extent, const float* x, int64_t keys,
                   RowCode* weights) {
    constexpr int kSteps = 1024;
    const float most = largest_of(extent.most), top = largest_of(extent.top);
    const bool none = most == -infinity() && !any_of(extent.nan);
    const bool invalid = !none && (room.invalid || !(most <= kLargest && !any_of(extent.nan)));
    if (none || invalid || (c.a.per_token && top == -infinity())) {
        std::memset(weights, 0, size_t(keys) * sizeof(RowCode));
        return invalid ? not_a_number() : 0.0f;
    }
    if (!c.a.per_token) return 1.0f / float(probabilities<255, true, false>(x, nullptr, keys, most, weights));
    probabilities<255, true, true>(x, room.logs(), keys, top, weights);
    const int32_t total = probabilities<kSteps, false, false>(x, nullptr, keys, most, nullptr);
    return functions::exactly(Function::exp, top - most) * (1.0f / float(total) * (float(kSteps) / 255.0f));
}

// Computes the weighted sums of values for rows `first` to `first + N - 1` and kLanes · kLinesAtOnce channels from p
// on.
template <int N>
static HOP_ALONE void add_values(const AttentionRoom& room, int first, int64_t p, int64_t keys, int64_t channels) {
    Ints sums[N][kLinesAtOnce];
    HOP_UNROLL
    for (int i = 0; i < N; ++i) {
        HOP_UNROLL
        for (int l = 0; l < kLinesAtOnce; ++l) sums[i][l] = Ints{};
    }
    const uint8_t* lines = room.values + p / kLanes * room.quads_of_values * kLine;
    multiply<N>(room.weights + first * room.apart, room.apart, lines, keys / kTogether, room.quads_of_values, sums);
    HOP_UNROLL
    for (int i = 0; i < N; ++i) {
        HOP_UNROLL
        for (int l = 0; l < kLinesAtOnce; ++l) store_as(room.sums + (first + i) * channels + p + l * kLanes, sums[i][l]);
    }
}

static HOP_ALONE void attend_block(const AttentionCall& c, const AttentionRoom& room, int64_t batch, const AttentionRow* row, int rows) {
    const int64_t step = kLanes * kLinesAtOnce, channels = AttentionRoom::value_lines(c.a) * kLanes;
    Extent extents[AttentionRoom::kMost];
    const bool few = is_few(c.a);
    int64_t keys = 0, all_see = c.a.mask ? 0 : c.a.keys;
    for (int i = 0; i < rows; ++i) {
        extents[i] = {all(-infinity()), all(-infinity()), Ints{}};
        keys = row[i].keys > keys ? row[i].keys : keys;
        all_see = least(row[i].keys, all_see);
    }
    keys = divide_up(keys, step) * step;
    take_queries(c, room, batch, row, rows);
    for (int64_t j = 0; j < keys; j += step) {
        const bool plain = j + step <= all_see;
        if (few) score_few(c, room, batch, row, rows, j, plain, extents);
        else in_row_blocks<kRowsAtOnce>(rows, [&](auto n, int first) { score<n.value>(c, room, batch, row, first, j, plain, extents); });
    }
    float factors[AttentionRoom::kMost];
    for (int i = 0; i < rows; ++i) factors[i] = weigh(c, room, extents[i], room.scores + i * room.apart, keys, room.weights + i * room.apart);
    if (few) add_few(c, room, batch, row, rows, keys, channels);
    for (int64_t p = 0; p < channels && !few; p += step) {
        in_row_blocks<kRowsAtOnce>(rows, [&](auto n, int first) { add_values<n.value>(room, first, p, keys, channels); });
    }
    for (int i = 0; i < rows; ++i) {
        auto* y = reinterpret_cast<float*>(room.sums + i * channels);
        for (int64_t p = 0; p < channels; p += kLanes) {
            const Floats sum = __builtin_convertvector(load_as<Ints>(y + p), Floats) * factors[i];
            store_as(y + p, sum * load_as<Floats>(room.channels() + p));
        }
        store_any(c, y, ((batch * c.a.heads + row[i].head) * c.a.queries + row[i].query) * c.a.value_width);
    }
}

// ---- heads

// Packs the keys and values of a head that rows with at most `seen` keys read.
static void take_head(const AttentionCall& c, AttentionRoom& room, int64_t batch, int64_t head, int64_t seen) {
    const hop_attention& a = c.a;
    const int64_t tokens = room.lines * kLanes, channels = AttentionRoom::value_lines(a) * kLanes;
    const int64_t lines = divide_up(line_count(seen), kLinesAtOnce) * kLinesAtOnce;
    if (!is_few(a)) {
        pack_keys(c.k + batch * a.k_stride[0] + head * a.k_stride[1], a.k_stride[2], seen, a.width, lines, room.keys);
        sum_keys(room.keys, room.quads_of_keys, lines, room.corrections);
        pack_values(c.v + batch * a.v_stride[0] + head * a.v_stride[1], a.v_stride[2], seen, a.value_width, lines * kLanes / kTogether,
                    room.quads_of_values, room.values);
        if (AttentionRoom::value_lines(a) != line_count(a.value_width)) {
            const int64_t done = line_count(a.value_width) * room.quads_of_values * kLine;
            std::memset(room.values + done, 0, room.sizes[1] - size_t(done));
        }
    }
    const float* of_keys = c.k_scale + batch * a.k_scale_stride[0] + head * a.k_scale_stride[1];
    for (int64_t j = 0; j < tokens; ++j) room.scales[j] = j < a.keys ? of_keys[j * a.k_scale_stride[2]] : 0.0f;
    const float* of_values = c.v_scale + batch * a.v_scale_stride[0] + head * a.v_scale_stride[1];
    if (!a.per_token) {
        for (int64_t p = 0; p < channels; ++p) room.channels()[p] = p < a.value_width ? of_values[p * a.v_scale_stride[2]] : 0.0f;
        return;
    }
    float* logs = room.logs();
    room.invalid = false;
    for (int64_t j = 0; j < tokens; ++j) {
        const float scale = j < a.keys ? of_values[j * a.v_scale_stride[2]] : 1.0f;
        room.invalid |= !(scale <= kLargest);
        logs[j] = scale > 0 ? scale : 1.0f;
    }
    evaluate(Function::log, logs, logs, tokens);
    for (int64_t j = 0; j < a.keys; ++j)
        if (!(of_values[j * a.v_scale_stride[2]] > 0)) logs[j] = -infinity();
    for (int64_t p = 0; p < channels; ++p) room.channels()[p] = 1.0f;
}
