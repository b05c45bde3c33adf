// Products of floats and weights with a scale for each group of a row. Included in a namespace (isa.h), after weight.h.
//
//     few rows of x      some rows of the weight are decoded in registers, and multiplied there
//     many rows of x     some rows of the weight are decoded to a strip of float32, which stays in the first-level cache
//                        while blocks of rows of x, which stay in the second-level cache, are multiplied by it
//
// The decoded weight equals that of dequantize bit for bit, and both methods add up lanes in the same order. Elements
// of x are first converted to float32, in the order of 8-bit codes: of 32 elements, the even ones and then the odd
// ones.

// Decodes a chunk of a row.
template <class F>
class Numbers {
public:
    explicit Numbers(const hop_group_product& p) : table_(Table::of(p.numbers)), decoder_(p.is_signed) {
        if (F::kBits != 2) return;
        float first[16], second[16];  // for each value of two codes together
        for (int i = 0; i < 16; ++i) first[i] = p.numbers[i & 3], second[i] = p.numbers[i >> 2];
        table_ = Table::of(first), of_second_ = Table::of(second);
    }

    HOP_INLINED void operator()(const uint8_t* codes, const uint8_t* high, RowScales s, int64_t chunk, Lanes& a, Lanes& b) const {
        // Scale the tables in advance.
        if constexpr (!F::kPairs && (F::kBits == 2 || F::kBits == 4 || Decoder<kDecoded>::kScales)) {
            const float factor = s.scale[chunk], less = F::kOffset ? s.offset[chunk] : 0.0f;
            if constexpr (F::kBits == 2)
                look_up_pairs(scaled<F::kOffset>(table_, factor, less), scaled<F::kOffset>(of_second_, factor, less), codes, a, b);
            else if constexpr (F::kBits == 4) look_up(scaled<F::kOffset>(table_, factor, less), codes, a, b);
            else decoder_.template scaled<F::kOffset>(codes, high, factor, less, a, b);
            return;
        }
        if constexpr (F::kBits == 2) look_up_pairs(table_, of_second_, codes, a, b);
        else if constexpr (F::kBits == 4) look_up(table_, codes, a, b);
        else decoder_(codes, high, a, b);
        if constexpr (F::kPairs && F::kBits == 8) {
            a = times(a, all(s.scale[2 * chunk])), b = times(b, all(s.scale[2 * chunk + 1]));
        } else {
            const auto spread = [chunk](const float* p) { return F::kPairs ? two(p + 2 * chunk) : all(p[chunk]); };
            const Lanes factor = spread(s.scale), less = F::kOffset ? spread(s.offset) : factor;
            scale(a, factor, less), scale(b, factor, less);
        }
    }

private:
    static HOP_INLINED inline void scale(Lanes& x, Lanes factor, Lanes less) {
        x = times(x, factor);
        if (F::kOffset) x = minus(x, less);
    }
    static constexpr int kDecoded = F::kBits == 4 || F::kBits == 2 ? 8 : F::kBits;
    Table table_, of_second_{};
    Decoder<kDecoded> decoder_;
};

// Converts a row of x to the order in which it is multiplied.
HOP_ALONE inline void prepare(const hop_group_product& p, const void* x, int64_t row, float* to) {
    const int64_t first = row * p.k;
    const auto* words = static_cast<const uint16_t*>(x) + first;
    if (p.x_format == HOP_FLOAT32) std::memcpy(to, static_cast<const float*>(x) + first, static_cast<size_t>(p.k) * sizeof(float));
    else if (p.x_format == HOP_FLOAT16) from_halves(words, p.k, to);
    else for (int64_t i = 0; i < p.k; ++i) to[i] = from_bfloat16(words[i]);
    if (p.bits == 8) return;
    for (int64_t i = 0; i < p.k; i += kChunk) {
        float chunk[kChunk];
        std::memcpy(chunk, to + i, sizeof(chunk));
        apart(chunk, to + i);
    }
}

// ---- few rows of x

// Multiplies up to M rows of x by up to N rows of the weight; the last row is repeated for missing ones.
template <class F, int M, int N>
void few(const GroupCall& call, const Numbers<F>& numbers, const Weight& weight, const float* x, int64_t row, int64_t columns, float* memory) {
    constexpr int64_t codes_bytes = codes_of_chunk(F::kBits), high_bytes = high_of_chunk(F::kBits);
    const int64_t k = call.p.k, rows = call.p.m;
    const uint8_t *codes[N], *high[N];
    const float* own[M];
    RowScales scales[N];
    Lanes sums[N][M];
    weight.fetch(row + kFetched / weight.bytes() + N, columns);
    weight.find(row, columns, memory);
    for (int i = 0; i < M; ++i) own[i] = x + (i < rows ? i : rows - 1) * k;
    for (int64_t j = 0; j < N; ++j) {
        const int64_t at = j < columns ? j : columns - 1;
        codes[j] = weight.codes(row + at), high[j] = weight.high(row + at), scales[j] = weight.found(at, columns, memory);
        for (int i = 0; i < M; ++i) sums[j][i] = all(0.0f);
    }
    const uint8_t *next = codes[0] + N * weight.bytes() + kFetched, *next_high = high[0] + N * weight.high_bytes() + kFetched;
    for (int64_t chunk = 0; chunk < k / kChunk; ++chunk) {
        HOP_UNROLL
        for (int64_t line = 0; line < N * codes_bytes; line += 64) __builtin_prefetch(next + chunk * N * codes_bytes + line, 0, 2);
        if (high_bytes) __builtin_prefetch(next_high + chunk * N * high_bytes, 0, 2);
        HOP_UNROLL
        for (int j = 0; j < N; ++j) {
            Lanes a, b;
            numbers(codes[j] + chunk * codes_bytes, high[j] + chunk * high_bytes, scales[j], chunk, a, b);
            HOP_UNROLL
            for (int i = 0; i < M; ++i) {
                const float* at = own[i] + chunk * kChunk;
                sums[j][i] = add_product(b, load(at + 16), add_product(a, load(at), sums[j][i]));
            }
        }
    }
    const Results results(call);
    for (int i = 0; i < M && i < rows; ++i) {
        float totals[N];
        for (int j = 0; j < N; ++j) totals[j] = total(sums[j][i]);
        results.put(i, row, totals, columns);
    }
}

template <class F, int M>
HOP_ALONE void few_rows(const GroupCall& call, const float* x, int64_t first, int64_t last, float* memory) {
    const Numbers<F> numbers(call.p);
    const Weight weight(call);
    for (int64_t row = first; row < last; row += kFewColumns) {
        const int64_t rest = last - row;
        few<F, M, kFewColumns>(call, numbers, weight, x, row, rest < kFewColumns ? rest : kFewColumns, memory);
    }
}

// ---- many rows

// Decodes some rows of the weight to float32, k values each.
template <class F>
HOP_ALONE void decode_rows(const GroupCall& call, int64_t row, int64_t rows, const float* scales, float* to) {
    const Numbers<F> numbers(call.p);
    const Weight weight(call);
    const int64_t k = call.p.k;
    for (int64_t j = 0; j < rows; ++j, to += k) {
        const uint8_t *codes = weight.codes(row + j), *high = weight.high(row + j);
        const RowScales s = weight.found(j, rows, scales);
        for (int64_t chunk = 0; chunk < k / kChunk; ++chunk) {
            Lanes a, b;
            numbers(codes + chunk * codes_of_chunk(F::kBits), high + chunk * high_of_chunk(F::kBits), s, chunk, a, b);
            store(to + chunk * kChunk, a), store(to + chunk * kChunk + 16, b);
        }
    }
}

// Multiplies M rows of x by a strip of kTileColumns rows of the weight, `columns` of which are valid.
template <int M>
HOP_ALONE void tile(const GroupCall& call, const float* x, int64_t row, const float* strip, int64_t column, int64_t columns) {
    const int64_t k = call.p.k;
    Lanes sums[M][kTileColumns];
    HOP_UNROLL
    for (int i = 0; i < M; ++i)
        HOP_UNROLL
        for (int j = 0; j < kTileColumns; ++j) sums[i][j] = all(0.0f);
    for (int64_t at = 0; at < k; at += 16) {
        Lanes w[kTileColumns];
        HOP_UNROLL
        for (int j = 0; j < kTileColumns; ++j) w[j] = load(strip + j * k + at);
        HOP_UNROLL
        for (int i = 0; i < M; ++i) {
            const Lanes own = load(x + i * k + at);
            HOP_UNROLL
            for (int j = 0; j < kTileColumns; ++j) sums[i][j] = add_product(w[j], own, sums[i][j]);
        }
    }
    const Results results(call);
    for (int i = 0; i < M; ++i) {
        float totals[kTileColumns];
        for (int j = 0; j < kTileColumns; ++j) totals[j] = total(sums[i][j]);
        results.put(row + i, column, totals, columns);
    }
}

// ---- a call

// The functions compiled for each form of a weight.
struct FormOfFloats {
    void (*one)(const GroupCall&, const float* x, int64_t first, int64_t last, float* memory);
    void (*two)(const GroupCall&, const float* x, int64_t first, int64_t last, float* memory);
    void (*few)(const GroupCall&, const float* x, int64_t first, int64_t last, float* memory);
    void (*decode)(const GroupCall&, int64_t row, int64_t rows, const float* scales, float* to);
};

template <class F>
FormOfFloats form_of() {
    if constexpr (kFromRegisters) return {few_rows<F, 1>, few_rows<F, 2>, few_rows<F, kFewRows>, decode_rows<F>};
    else return {nullptr, nullptr, nullptr, decode_rows<F>};
}

// Multiplies `rows` rows of x, from `first` on, by up to kTileColumns rows of the weight from `column` on.
inline void strip(const GroupCall& call, const FormOfFloats& form, const float* x, int64_t first, int64_t rows, int64_t column, float* memory) {
    const Weight weight(call);
    const int64_t k = call.p.k, rest = call.p.n - column, columns = rest < kTileColumns ? rest : kTileColumns;
    float* decoded = memory + weight.floats(kTileColumns);
    weight.find(column, columns, memory);
    form.decode(call, column, columns, memory, decoded);
    std::memset(decoded + columns * k, 0, static_cast<size_t>((kTileColumns - columns) * k) * sizeof(float));
    int64_t i = 0;
    for (; i + kTileRows <= rows; i += kTileRows) tile<kTileRows>(call, x + i * k, first + i, decoded, column, columns);
    for (; i < rows; ++i) tile<1>(call, x + i * k, first + i, decoded, column, columns);
}

inline int multiply(const GroupCall& call, const FormOfFloats& form) {
    const hop_group_product& p = call.p;
    const Weight weight(call);
    Scratch& of_x = memory_of_x();
    const bool is_few = kFromRegisters && p.m <= kFewRows;
    int64_t block = is_few ? p.m : kBlockBytes / (p.k * int64_t(sizeof(float))) / kTileRows * kTileRows;
    if (block < 4 * kTileRows && !is_few) block = 4 * kTileRows;
    if (block > p.m) block = p.m;
    auto* x = reinterpret_cast<float*>(of_x.get(static_cast<size_t>(block * p.k) * sizeof(float)));
    if (!x) return HOP_NO_MEMORY;
    const int64_t columns = is_few ? 4 * kFewColumns : kTileColumns, panels = (p.n + columns - 1) / columns;
    const int64_t floats = is_few ? weight.floats(kFewColumns) : weight.floats(kTileColumns) + kTileColumns * p.k;
    const int threads = worth(call.threads, p.n * p.k / 4 * (is_few ? 1 : block), kWorthAThread);
    std::atomic<int> error{HOP_OK};
    for (int64_t first = 0; first < p.m; first += block) {
        const int64_t rows = p.m - first < block ? p.m - first : block;
        for (int64_t i = 0; is_few && i < rows; ++i) prepare(p, call.x, i, x + i * p.k);
        Queue rows_left(is_few ? 0 : rows, 8), panels_left(panels, panels >= 64 * threads ? 8 : 1);
        Barrier prepared;
        parallel(threads, [&](int, int team) {
            Scratch& own = memory_of_thread();
            auto* memory = reinterpret_cast<float*>(own.get(static_cast<size_t>(floats) * sizeof(float)));
            if (!memory) error = HOP_NO_MEMORY;
            int64_t begin, end;
            while (rows_left.take(begin, end))
                for (int64_t i = begin; i < end; ++i) prepare(p, call.x, first + i, x + i * p.k);
            if (!is_few) prepared.wait(team);
            if (!memory) return;
            if (is_few) {
                while (panels_left.take(begin, end)) {
                    const int64_t last = end * columns < p.n ? end * columns : p.n;
                    (p.m == 1 ? form.one : p.m == 2 ? form.two : form.few)(call, x, begin * columns, last, memory);
                }
            } else {
                while (panels_left.take(begin, end))
                    for (int64_t panel = begin; panel < end; ++panel)
                        strip(call, form, x, first, rows, panel * columns, memory);
            }
            own.trim();
        });
        if (error) break;
    }
    of_x.trim();
    return error;
}
