// Products by weights with a scale for each group of a row. Included in a namespace (isa.h), after the lanes of a level.
//
//     few rows of x     some rows of the weight are decoded in registers, and multiplied there
//     many              some rows of the weight are decoded to a strip of float32 numbers, which stays in the first-level
//                       cache while blocks of rows of x, which stay in the second, are multiplied by it
//
// A weight's numbers are those of dequantize, bit for bit; lanes add them up in the same order both ways. Elements of x
// become float32 first, and lie as the codes of bytes do: of 32, the even ones and then the odd ones.

constexpr int64_t kChunk = 32;                    // elements that are decoded at once
constexpr int64_t kBlockBytes = 512 << 10;        // of rows of x that are multiplied by a strip
constexpr int64_t kFetched = 4 << 10;             // bytes that are fetched before they are read
constexpr int64_t kWorthAThread = int64_t(1) << 16;  // products

// Bytes of a chunk: of codes, and of their high bits.
constexpr int64_t codes_of_chunk(int bits) { return bits == 8 ? 32 : bits < 4 ? 8 : 16; }
constexpr int64_t high_of_chunk(int bits) { return bits == 6 ? 8 : bits == 3 || bits == 5 ? 4 : 0; }

// What differs between weights.
template <int B, bool P, bool O>
struct Form {
    static constexpr int kBits = B;
    static constexpr bool kPairs = P, kOffset = O;  // two scales for each chunk; whether there are offsets
};

// The scales and offsets of a row of a weight: one for each chunk, or two.
struct RowScales {
    const float *scale, *offset;
};

// Where rows of a weight lie.
class Weight {
public:
    explicit Weight(const GroupCall& call)
        : p_(call.p), d_(call.weight), codes_(p_.k / kChunk * codes_of_chunk(p_.bits)), high_(p_.k / kChunk * high_of_chunk(p_.bits)),
          groups_(p_.k / p_.scales.group), outers_(outers_of(p_)),
          each_(p_.scales.group > kChunk ? p_.scales.group / kChunk : 1), served_(groups_ * each_) {}

    const uint8_t* codes(int64_t row) const { return static_cast<const uint8_t*>(d_.codes) + row * codes_; }
    const uint8_t* high(int64_t row) const { return static_cast<const uint8_t*>(d_.high) + row * high_; }
    int64_t bytes() const { return codes_; }
    int64_t high_bytes() const { return high_; }

    // Finds those of some rows, in memory for floats(rows).
    int64_t floats(int64_t rows) const { return rows * (2 * served_ + groups_ + outers_) + kMore; }
    void find(int64_t row, int64_t rows, float* memory) const {
        float* rest = memory + rows * 2 * served_;
        serve(row, rows, d_.scale, d_.outer_scale, memory, rest);
        if (p_.has_offset) serve(row, rows, d_.offset, d_.outer_offset, memory + rows * served_, rest);
    }
    RowScales found(int64_t row, int64_t rows, const float* memory) const {
        return {memory + row * served_, memory + (rows + row) * served_};
    }

private:
    static constexpr int64_t kMore = 16;  // that whole lanes may be written behind the last

    static int64_t outers_of(const hop_group_product& p) {
        const hop_group_scales& s = p.scales;
        return s.outer_format == HOP_NONE ? 0 : s.outer ? (p.k + s.outer - 1) / s.outer : 1;
    }

    void serve(int64_t row, int64_t rows, const void* inner, const void* outer, float* to, float* rest) const {
        const hop_group_scales& s = p_.scales;
        float *own = each_ == 1 ? to : rest, *over = rest + rows * groups_;
        if (!outers_) {
            numbers(s.format, inner, row * groups_, rows * groups_, own);
        } else if (!s.outer) {
            numbers(s.outer_format, outer, 0, 1, over);
            multiply(inner, row * groups_, rows * groups_, over, rows * groups_, own);
        } else {
            numbers(s.outer_format, outer, row * outers_, rows * outers_, over);
            const int64_t under = s.outer / s.group;
            if (groups_ == outers_ * under) multiply(inner, row * groups_, rows * groups_, over, under, own);
            else for (int64_t i = 0; i < rows; ++i) multiply(inner, (row + i) * groups_, groups_, over + i * outers_, under, own + i * groups_);
        }
        for (int64_t i = 0; each_ > 1 && i < rows * served_; ++i) to[i] = own[i / each_];
    }

    // Scales from `first` on under numbers for each `under` of them.
    void multiply(const void* inner, int64_t first, int64_t count, const float* over, int64_t under, float* to) const {
        const hop_group_scales& s = p_.scales;
        const bool is_signed = s.format == HOP_INT8;
        int64_t i = 0;
        if ((is_signed || s.format == HOP_UINT8) && !s.numbers && !s.divided && under % 8 == 0) {
            const auto* bytes = static_cast<const uint8_t*>(inner) + first;
            for (; i + 16 <= count; i += 16)
                store(to + i, times(halves(over[i / under], over[(i + 8) / under]), from_bytes(bytes + i, is_signed)));
        }
        numbers(s.format, inner, first + i, count - i, to + i);
        while (i < count) {
            const float number = over[i / under];
            const int64_t next = (i / under + 1) * under, last = next < count ? next : count;
            if (s.divided) for (; i < last; ++i) to[i] = to[i] / number;
            else for (; i < last; ++i) to[i] = number * to[i];
        }
    }

    void numbers(int32_t format, const void* data, int64_t first, int64_t count, float* to) const {
        if (format == HOP_FLOAT16) return from_halves(static_cast<const uint16_t*>(data) + first, count, to);
        const auto* bytes = static_cast<const uint8_t*>(data) + first;
        const auto* words = static_cast<const uint16_t*>(data) + first;
        if (format == HOP_FLOAT32) std::memcpy(to, static_cast<const float*>(data) + first, static_cast<size_t>(count) * sizeof(float));
        else if (format == HOP_BFLOAT16) for (int64_t i = 0; i < count; ++i) to[i] = from_bfloat16(words[i]);
        else if (p_.scales.numbers) for (int64_t i = 0; i < count; ++i) to[i] = p_.scales.numbers[bytes[i]];
        else if (format == HOP_INT8) for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(static_cast<int8_t>(bytes[i]));
        else for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(bytes[i]);
    }

    const hop_group_product& p_;
    const hop_group_data& d_;
    int64_t codes_, high_, groups_, outers_, each_, served_;  // bytes, and numbers, of a row; chunks of a group
};

// The numbers of a chunk of a row.
template <class F>
class Numbers {
public:
    explicit Numbers(const hop_group_product& p) : table_(Table::of(p.numbers)), decoder_(p.is_signed) {
        if (F::kBits != 2) return;
        float first[16], second[16];  // of two codes, by both
        for (int i = 0; i < 16; ++i) first[i] = p.numbers[i & 3], second[i] = p.numbers[i >> 2];
        table_ = Table::of(first), of_second_ = Table::of(second);
    }

    HOP_INLINED void operator()(const uint8_t* codes, const uint8_t* high, RowScales s, int64_t chunk, Lanes& a, Lanes& b) const {
        if constexpr (!F::kPairs && (F::kBits == 2 || F::kBits == 4 || Decoder<kDecoded>::kScales)) {  // tables are scaled
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

// ---- results

class Results {
public:
    explicit Results(const GroupCall& call) : p_(call.p), bias_(call.bias), y_(call.y) {}

    HOP_INLINED void put(int64_t row, int64_t column, float sum) const {
        if (bias_) sum += number(p_.bias_format, bias_, column);
        const int64_t at = row * p_.n + column;
        if (p_.output_format == HOP_FLOAT32) static_cast<float*>(y_)[at] = sum;
        else static_cast<uint16_t*>(y_)[at] = p_.output_format == HOP_BFLOAT16 ? to_bfloat16(sum) : to_float16(sum);
    }

private:
    static float number(int32_t format, const void* data, int64_t at) {
        if (format == HOP_FLOAT32) return static_cast<const float*>(data)[at];
        const uint16_t word = static_cast<const uint16_t*>(data)[at];
        return format == HOP_BFLOAT16 ? from_bfloat16(word) : from_float16(word);
    }
    const hop_group_product& p_;
    const void* bias_;
    void* y_;
};

// A row of x as it is multiplied.
inline void prepare(const hop_group_product& p, const void* x, int64_t row, float* to) {
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

// Up to M rows of x by up to N rows of the weight: the last one stands for those that there are not.
template <class F, int M, int N>
void few(const GroupCall& call, const Numbers<F>& numbers, const Weight& weight, const float* x, int64_t row, int64_t columns, float* memory) {
    constexpr int64_t codes_bytes = codes_of_chunk(F::kBits), high_bytes = high_of_chunk(F::kBits);
    const int64_t k = call.p.k, rows = call.p.m;
    const uint8_t *codes[N], *high[N];
    const float* own[M];
    RowScales scales[N];
    Lanes sums[N][M];
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
    for (int j = 0; j < N && j < columns; ++j)
        for (int i = 0; i < M && i < rows; ++i) results.put(i, row + j, total(sums[j][i]));
}

template <class F, int M>
void few_rows(const GroupCall& call, const float* x, int64_t first, int64_t last, float* memory) {
    const Numbers<F> numbers(call.p);
    const Weight weight(call);
    for (int64_t row = first; row < last; row += kFewColumns) {
        const int64_t rest = last - row;
        few<F, M, kFewColumns>(call, numbers, weight, x, row, rest < kFewColumns ? rest : kFewColumns, memory);
    }
}

// ---- many rows

template <class F>
void decode_row(const Numbers<F>& numbers, const Weight& weight, int64_t row, int64_t k, RowScales scales, float* to) {
    const uint8_t *codes = weight.codes(row), *high = weight.high(row);
    for (int64_t chunk = 0; chunk < k / kChunk; ++chunk) {
        Lanes a, b;
        numbers(codes + chunk * codes_of_chunk(F::kBits), high + chunk * high_of_chunk(F::kBits), scales, chunk, a, b);
        store(to + chunk * kChunk, a), store(to + chunk * kChunk + 16, b);
    }
}

// M rows of x by a strip of kTileColumns rows of the weight, of which `columns` are any.
template <int M>
void tile(const GroupCall& call, const float* x, int64_t row, const float* strip, int64_t column, int64_t columns) {
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
    for (int i = 0; i < M; ++i)
        for (int64_t j = 0; j < columns; ++j) results.put(row + i, column + j, total(sums[i][j]));
}

// `rows` rows of x, from `first` on, by the rows of the weight that are kTileColumns from `column` on.
template <class F>
void strip(const GroupCall& call, const Numbers<F>& numbers, const float* x, int64_t first, int64_t rows, int64_t column, float* memory) {
    const Weight weight(call);
    const int64_t k = call.p.k, rest = call.p.n - column, columns = rest < kTileColumns ? rest : kTileColumns;
    float* decoded = memory + weight.floats(kTileColumns);
    weight.find(column, columns, memory);
    for (int64_t j = 0; j < kTileColumns; ++j) {
        if (j < columns) decode_row(numbers, weight, column + j, k, weight.found(j, columns, memory), decoded + j * k);
        else std::memset(decoded + j * k, 0, static_cast<size_t>(k) * sizeof(float));
    }
    int64_t i = 0;
    for (; i + kTileRows <= rows; i += kTileRows) tile<kTileRows>(call, x + i * k, first + i, decoded, column, columns);
    for (; i < rows; ++i) tile<1>(call, x + i * k, first + i, decoded, column, columns);
}

// ---- a call

inline Scratch& memory_of_x() {
    static thread_local Scratch memory;
    return memory;
}
inline Scratch& memory_of_thread() {
    static thread_local Scratch memory;
    return memory;
}

template <class F>
int multiply(const GroupCall& call) {
    const hop_group_product& p = call.p;
    const Weight weight(call);
    Scratch& of_x = memory_of_x();
    const bool is_few = p.m <= kFewRows;
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
                    if (p.m == 1) few_rows<F, 1>(call, x, begin * columns, last, memory);
                    else if (p.m == 2) few_rows<F, 2>(call, x, begin * columns, last, memory);
                    else few_rows<F, kFewRows>(call, x, begin * columns, last, memory);
                }
            } else {
                const Numbers<F> numbers(p);
                while (panels_left.take(begin, end))
                    for (int64_t panel = begin; panel < end; ++panel)
                        strip<F>(call, numbers, x, first, rows, panel * columns, memory);
            }
            own.trim();
        });
        if (error) break;
    }
    of_x.trim();
    return error;
}

template <int Bits>
int multiply_bits(const GroupCall& call) {
    const bool pairs = call.p.scales.group < kChunk;
    if constexpr (Bits != 8)
        if (call.p.has_offset) return pairs ? multiply<Form<Bits, true, true>>(call) : multiply<Form<Bits, false, true>>(call);
    return pairs ? multiply<Form<Bits, true, false>>(call) : multiply<Form<Bits, false, false>>(call);
}

int run(const GroupCall& call) {
    switch (call.p.bits) {
        case 2: return multiply_bits<2>(call);
        case 3: return multiply_bits<3>(call);
        case 4: return multiply_bits<4>(call);
        case 5: return multiply_bits<5>(call);
        case 6: return multiply_bits<6>(call);
        default: return multiply_bits<8>(call);
    }
}
