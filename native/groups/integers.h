// Products of int8 codes and weights with a scale for each group of a row. Included in a namespace (isa.h), after
// weight.h, the integers of a level and codes_of_rows.h.
//
//     few rows of x      rows of the weight are converted to bytes in registers, one after the other; sums of 16 groups are
//                        computed at a time, and multiplied by their scales; the terms of 16 rows of the weight are then
//                        added up together
//     many rows of x     16 rows of the weight are converted to a strip of bytes, with four bytes of each row in turn, and
//                        each register accumulates 16 rows of the weight for a row of x
//
// Integer sums are exact, and the float operations are the same in both methods and at every level. Only unpacking of
// codes is compiled separately for each form of a weight (FormOfIntegers).

constexpr int64_t kIntegersFetched = 8 << 10;  // prefetch distance in bytes of codes, for few rows
constexpr int64_t kBegun = 2 << 10;            // the same while rows of x are prepared

// A product in the form that all functions use.
struct ProductOfIntegers {
    const GroupCall& call;
    const Steps& steps;
    const Codes& codes;
    const RowsOfCodes& x;
};

// The float operations: (float32(sum) · scale of x) · scale, minus (float32(sum of x) · scale of x) · offset.
template <bool Offset>
HOP_INLINED inline Lanes term(Lanes sum, Lanes x_scale, Lanes x_sum, Lanes scale, const float* offset) {
    const Lanes product = times(times(sum, x_scale), scale);
    return Offset ? minus(product, times(x_sum, load(offset))) : product;
}

// ---- few rows of x

// The addresses of the codes of 16 units.
template <class F>
struct Sixteen {
    static constexpr int64_t kBlocks = F::kPairs ? 2 : 4, kChunks = 4 * kBlocks, kUnit = F::kPairs ? kChunk / 2 : kChunk;
    static constexpr int64_t kBytes = kChunks * codes_of_chunk(F::kBits), kHigh = kChunks * high_of_chunk(F::kBits);
    const uint8_t *low, *high;

    HOP_INLINED void next() { low += kBytes, high += kHigh; }

    // Multiplies the bytes of the units by some rows of x, whose codes begin at `at`.
    template <int Rows, class C>
    HOP_INLINED void sum(const C& codes, const int8_t* const (&x)[Rows], int64_t at, Ints (&sums)[Rows]) const {
        Ints e[Rows][kBlocks];
        fetch_ahead();
        HOP_UNROLL
        for (int b = 0; b < kBlocks; ++b) {
            const Block w = codes.template block<F::kBits>(low + b * kBytes / kBlocks, high + b * kHigh / kBlocks);
            HOP_UNROLL
            for (int i = 0; i < Rows; ++i) e[i][b] = codes.dot(all_ints(0), w, x[i] + at + b * kBlock);
        }
        HOP_UNROLL
        for (int i = 0; i < Rows; ++i) {
            if constexpr (F::kPairs) sums[i] = sums_of_halves(e[i]);
            else sums[i] = sums_of_chunks(e[i]);
        }
    }

private:
    // Prefetches later lines.
    HOP_INLINED void fetch_ahead() const {
        HOP_UNROLL
        for (int64_t line = 0; line < kBytes; line += 64) __builtin_prefetch(low + line + kIntegersFetched, 0, 3);
        HOP_UNROLL
        for (int64_t line = 0; line < kHigh; line += 64) __builtin_prefetch(high + line + kIntegersFetched, 0, 3);
    }
};

// The rows of x to multiply by, and the destinations of the sums of units and of the terms.
template <int M>
struct RowsOfTerms {
    RowOfCodes x[M];
    int32_t* sums[M];
    float* terms[M];
};

// Processes `count` groups of 16 units, beginning at `unit` of the `units` of a row of x: computes terms, from `first`
// on, if each unit has its own scale, or else the sums of bytes. Arguments are copied, so that they stay in registers.
template <class F, int M, bool Terms>
HOP_ALONE void of_units(const Codes& given, const RowsOfTerms<M>& r, const uint8_t* low, const uint8_t* high, RowScales s, int64_t first,
                        int64_t unit, int64_t units, int64_t count) {
    const Codes codes = given;
    Sixteen<F> w{low, high};
    const int8_t* x[M];
    const int32_t* added[M];
    const float *x_scale[M], *x_sum[M];
    int32_t* sums[M];
    float* terms[M];
    for (int i = 0; i < M; ++i) {
        x[i] = r.x[i].codes, added[i] = r.x[i].added, x_scale[i] = r.x[i].scale, x_sum[i] = r.x[i].sum;
        sums[i] = r.sums[i] + first, terms[i] = r.terms[i] + first;
    }
    for (int64_t at = 0; at < 16 * count; at += 16) {
        Ints found[M];
        w.template sum<M>(codes, x, unit * Sixteen<F>::kUnit, found);
        if constexpr (Terms) {
            const Lanes scale = load(s.scale + at);
            HOP_UNROLL
            for (int i = 0; i < M; ++i) {
                const Lanes sum = to_floats(plus_ints(found[i], load_ints(added[i] + unit)));
                store(terms[i] + at, term<F::kOffset>(sum, load(x_scale[i] + unit), load(x_sum[i] + unit), scale, s.offset + at));
            }
        } else {
            HOP_UNROLL
            for (int i = 0; i < M; ++i) store_ints(sums[i] + at, found[i]);
        }
        w.next();
        unit += 16;
        while (unit >= units) unit -= units;
    }
}

// Splits a row of the weight into groups of 16 units; the remaining units at the end are copied and padded with zeros.
class InSixteens {
public:
    InSixteens(const hop_group_product& p, const Steps& steps, int64_t chunks)
        : each_(steps.pairs ? 8 : 16), count_(chunks / each_), rest_(static_cast<size_t>(chunks - count_ * each_)),
          bytes_(codes_of_chunk(p.bits)), high_(high_of_chunk(p.bits)) {}

    // Calls run(codes, high bits, first unit, number of groups of 16).
    template <class Run>
    HOP_INLINED void operator()(const uint8_t* low, const uint8_t* high, const Run& run) {
        run(low, high, int64_t(0), count_);
        if (!rest_) return;
        std::memcpy(own_, low + count_ * each_ * bytes_, rest_ * static_cast<size_t>(bytes_));
        if (high_) std::memcpy(own_high_, high + count_ * each_ * high_, rest_ * static_cast<size_t>(high_));
        run(own_, own_high_, count_, int64_t(1));
    }

private:
    int64_t each_, count_;  // units in a group of 16 chunks, and number of whole groups
    size_t rest_;
    int64_t bytes_, high_;  // per chunk
    uint8_t own_[16 * codes_of_chunk(8)] = {}, own_high_[16 * high_of_chunk(6)] = {};
};

// Computes the terms of a row of the weight and one of x from the sums of units, if several units share scales. Steps
// of Each units are computed in parallel; the remaining ones, or all with 0, one after the other.
template <int Each, bool Offset>
HOP_ALONE void add_steps(const Steps& steps, RowScales s, const RowOfCodes& x, const int32_t* __restrict__ sums, float* __restrict__ terms) {
    const int64_t count = steps.count, each = Each ? Each : steps.each, units = steps.units, whole = Each ? units / each : 0;
    const auto put = [=](int64_t step, uint32_t total) HOP_INLINED {
        const float product = static_cast<float>(static_cast<int32_t>(total)) * x.scale[step] * s.scale[step * each];
        terms[step] = Offset ? product - x.sum[step] * s.offset[step * each] : product;
    };
    for (int64_t step = 0; step < whole; ++step) {
        auto total = static_cast<uint32_t>(x.added[step]);
        for (int unit = 0; unit < Each; ++unit) total += static_cast<uint32_t>(sums[step * each + unit]);
        put(step, total);
    }
    for (int64_t step = whole; step < count; ++step) {
        const int64_t last = (step + 1) * each < units ? (step + 1) * each : units;
        auto total = static_cast<uint32_t>(x.added[step]);
        for (int64_t unit = step * each; unit < last; ++unit) total += static_cast<uint32_t>(sums[unit]);
        put(step, total);
    }
}

template <bool Offset>
auto add_steps_of(int64_t each) {
    return each == 2 ? add_steps<2, Offset> : each == 4 ? add_steps<4, Offset> : add_steps<0, Offset>;
}

// Adds up the terms of a row of x and 16 rows of the weight, whose distance is `apart`.
HOP_ALONE inline void add_up(const float* terms, int64_t apart, int64_t count, float* results) {
    alignas(64) float square[16 * kColumns];
    constexpr int64_t few = 4;  // up to this many are added one by one, faster than transposing 16
    Lanes y{};
    int64_t first = 0;
    for (; first < count && (!first || count - first > few); first += 16) {
        turn(terms + first, apart * 4, square);
        for (int64_t step = 0; step < 16 && step < count - first; ++step) {
            const Lanes own = load(square + step * kColumns);
            y = first + step ? plus(y, own) : own;
        }
    }
    store(results, y);
    for (int64_t step = first; step < count; ++step)
        for (int64_t j = 0; j < kColumns; ++j) results[j] += terms[j * apart + step];
}

// Converts a row of the weight to bytes.
template <int Bits>
HOP_ALONE void decode_row(const Codes& codes, const uint8_t* low, const uint8_t* high, int64_t chunks, uint8_t* to) {
    constexpr int64_t bytes = 4 * codes_of_chunk(Bits), more = 4 * high_of_chunk(Bits);
    uint8_t last[bytes] = {}, last_high[more + 1] = {};
    for (; chunks > 0; chunks -= 4, low += bytes, high += more, to += kBlock) {
        if (chunks < 4) {
            std::memcpy(last, low, static_cast<size_t>(chunks * bytes / 4));
            if (more) std::memcpy(last_high, high, static_cast<size_t>(chunks * more / 4));
            low = last, high = last_high;
        }
        const Block w = codes.template block<Bits>(low, high);
        store_bytes(to, w.first), store_bytes(to + 64, w.second);
    }
}

// The functions compiled for each form of a weight.
struct FormOfIntegers {
    template <int M>
    using OfUnits = void (*)(const Codes&, const RowsOfTerms<M>&, const uint8_t* low, const uint8_t* high, RowScales, int64_t first,
                             int64_t unit, int64_t units, int64_t count);
    OfUnits<1> one_by_sums, one_by_terms;
    OfUnits<kIntegerFew> few_by_sums, few_by_terms;
    void (*decode_row)(const Codes&, const uint8_t* low, const uint8_t* high, int64_t chunks, uint8_t* to);
};

template <class F>
FormOfIntegers form_of() {
    if constexpr (!kFromRegisters) return {nullptr, nullptr, nullptr, nullptr, decode_row<F::kBits>};
    else {
        using WithoutOffset = Form<F::kBits, F::kPairs, false>;
        return {of_units<WithoutOffset, 1, false>, of_units<F, 1, true>, of_units<WithoutOffset, kIntegerFew, false>,
                of_units<F, kIntegerFew, true>, decode_row<F::kBits>};
    }
}

template <int M>
class FewOfIntegers {
public:
    FewOfIntegers(const ProductOfIntegers& p, const FormOfIntegers& form, float* memory)
        : call_(p.call), steps_(p.steps), codes_(p.codes), form_(form), weight_(p.call), scales_(memory),
          ahead_(kIntegersFetched / weight_.bytes() + kColumns) {
        const int64_t each = kColumns * steps_.padded;
        float* terms = memory + weight_.floats(kColumns);
        auto* sums = reinterpret_cast<int32_t*>(terms + M * each);
        for (int i = 0; i < M; ++i)
            rows_.x[i] = p.x[i < call_.p.m ? i : call_.p.m - 1], rows_.terms[i] = terms + i * each, rows_.sums[i] = sums + i * each;
    }
    static int64_t floats(const Weight& weight, const Steps& steps) { return weight.floats(kColumns) + 2 * M * kColumns * steps.padded; }

    HOP_ALONE void operator()(int64_t column, int64_t columns) const {
        weight_.fetch(column + ahead_, columns);
        weight_.find(column, columns, scales_);
        // Rows and their scales are contiguous. If each row consists of whole blocks, and all rows together of whole
        // groups of 16 units, a group may end one row and begin the next.
        const bool is_one = steps_.chunks % 4 == 0 && columns * steps_.units % 16 == 0;
        const int64_t apart = is_one ? steps_.units : steps_.padded, rows = is_one ? 1 : columns;
        InSixteens sixteens(call_.p, steps_, is_one ? columns * steps_.chunks : steps_.chunks);
        const auto run = of_units();
        for (int64_t j = 0; j < rows; ++j) {
            const RowScales s = weight_.found(j, columns, scales_);
            sixteens(weight_.codes(column + j), weight_.high(column + j), [&](const uint8_t* low, const uint8_t* high, int64_t begin, int64_t count) {
                const int64_t first = 16 * begin;
                run(codes_, rows_, low, high, {s.scale + first, s.offset + first}, j * apart + first, first, steps_.units, count);
            });
        }
        const auto add = call_.p.has_offset ? add_steps_of<true>(steps_.each) : add_steps_of<false>(steps_.each);
        for (int i = 0; i < M && i < call_.p.m && steps_.each > 1; ++i)
            for (int64_t j = 0; j < columns; ++j)
                add(steps_, weight_.found(j, columns, scales_), rows_.x[i], rows_.sums[i] + j * apart, rows_.terms[i] + j * apart);
        const Results results(call_);
        for (int i = 0; i < M && i < call_.p.m; ++i) {
            float numbers[kColumns];
            add_up(rows_.terms[i], apart, steps_.count, numbers);
            results.put(i, column, numbers, columns);
        }
    }

private:
    FormOfIntegers::OfUnits<M> of_units() const {
        const bool is_terms = steps_.each == 1;
        if constexpr (M == 1) return is_terms ? form_.one_by_terms : form_.one_by_sums;
        else return is_terms ? form_.few_by_terms : form_.few_by_sums;
    }

    const GroupCall& call_;
    const Steps& steps_;
    const Codes& codes_;
    const FormOfIntegers& form_;
    const Weight weight_;
    float* scales_;
    RowsOfTerms<M> rows_;
    int64_t ahead_;  // distance in rows of the weight at which scales are prefetched
};

// ---- many rows

class StripOfIntegers {
public:
    StripOfIntegers(const ProductOfIntegers& p, const FormOfIntegers& form, float* memory)
        : call_(p.call), steps_(p.steps), codes_(p.codes), form_(form), weight_(p.call), x_(p.x), found_(memory),
          scales_(memory + weight_.floats(kColumns)), offsets_(scales_ + kColumns * steps_.padded),
          rows_(reinterpret_cast<uint8_t*>(offsets_ + kColumns * steps_.padded)), strip_(rows_ + kColumns * steps_.bytes) {}
    static int64_t floats(const Weight& weight, const Steps& steps) {
        return weight.floats(kColumns) + 2 * kColumns * steps.padded + kColumns * steps.bytes / 2;
    }

    // Processes rows of x from `first` on; the memory begins at row `first`.
    HOP_ALONE void operator()(int64_t column, int64_t first, int64_t rows) const {
        const int64_t rest = call_.p.n - column, columns = rest < kColumns ? rest : kColumns;
        decode(column, columns);
        if (call_.p.has_offset) steps_.pairs ? tiles<true, true>(first, rows, column, columns) : tiles<false, true>(first, rows, column, columns);
        else steps_.pairs ? tiles<true, false>(first, rows, column, columns) : tiles<false, false>(first, rows, column, columns);
    }

private:
    HOP_ALONE void decode(int64_t column, int64_t columns) const {
        weight_.find(column, columns, found_);
        for (int64_t j = 0; j < columns; ++j)
            form_.decode_row(codes_, weight_.codes(column + j), weight_.high(column + j), steps_.chunks, rows_ + j * steps_.bytes);
        std::memset(rows_ + columns * steps_.bytes, 0, static_cast<size_t>((kColumns - columns) * steps_.bytes));
        for (int64_t at = 0; at < steps_.bytes; at += 64) turn(rows_ + at, steps_.bytes, strip_ + at * kColumns);
        for (int64_t j = 0; j < kColumns; ++j) {
            const RowScales s = weight_.found(j < columns ? j : columns - 1, columns, found_);
            for (int64_t step = 0; step < steps_.count; ++step) {
                scales_[step * kColumns + j] = s.scale[step * steps_.each];
                if (call_.p.has_offset) offsets_[step * kColumns + j] = s.offset[step * steps_.each];
            }
        }
    }

    template <bool Pairs, bool Offset>
    HOP_INLINED void tiles(int64_t first, int64_t rows, int64_t column, int64_t columns) const {
        int64_t i = 0;
        for (; i + kIntegerRows <= rows; i += kIntegerRows) tile<Pairs, Offset, kIntegerRows>(i, first, column, columns);
        for (; i + 2 <= rows; i += 2) tile<Pairs, Offset, 2>(i, first, column, columns);
        if (i < rows) tile<Pairs, Offset, 1>(i, first, column, columns);
    }

    template <bool Pairs, bool Offset, int M>
    HOP_ALONE void tile(int64_t row, int64_t first, int64_t column, int64_t columns) const {
        RowOfCodes x[M];
        const int8_t* of_x[M];
        Lanes y[M];
        for (int i = 0; i < M; ++i) x[i] = x_[row + i], of_x[i] = x[i].codes, y[i] = all(-0.0f);  // -0 + y is y, also for y = -0
        for (int64_t step = 0; step < steps_.count; ++step) {
            Ints sums[M];
            HOP_UNROLL
            for (int i = 0; i < M; ++i) sums[i] = all_ints(x[i].added[step]);
            const int64_t begin = step * steps_.each, last = begin + steps_.each < steps_.units ? begin + steps_.each : steps_.units;
            for (int64_t unit = begin; unit < last; ++unit) of_unit<Pairs, M>(unit, of_x, sums);
            const Lanes scale = load(scales_ + step * kColumns);
            const float* offset = offsets_ + step * kColumns;
            HOP_UNROLL
            for (int i = 0; i < M; ++i) y[i] = plus(y[i], term<Offset>(to_floats(sums[i]), all(x[i].scale[step]), all(x[i].sum[step]), scale, offset));
        }
        const Results results(call_);
        for (int i = 0; i < M; ++i) {
            float numbers[kColumns], *direct = columns == kColumns ? results.floats(first + row + i, column) : nullptr;
            store(direct ? direct : numbers, y[i]);
            if (!direct) results.put(first + row + i, column, numbers, columns);
        }
    }

    template <bool Pairs, int M>
    HOP_INLINED void of_unit(int64_t unit, const int8_t* const (&x)[M], Ints (&sums)[M]) const {
        constexpr int per_chunk = Pairs ? 2 : 1;
        const auto own = static_cast<uint64_t>(unit), chunk = own / per_chunk;
        codes_.unit<4 / per_chunk>(strip_, x, static_cast<int64_t>(chunk / 4 * kBlock + chunk % 4 * 16 + own % per_chunk * 8), sums);
    }

    const GroupCall& call_;
    const Steps& steps_;
    const Codes& codes_;
    const FormOfIntegers& form_;
    const Weight weight_;
    const RowsOfCodes& x_;
    float *found_, *scales_, *offsets_;  // per row of the weight, and per step
    uint8_t *rows_, *strip_;
};

// ---- a call

template <int M>
void few_of_integers(const ProductOfIntegers& product, const FormOfIntegers& form, int64_t first, int64_t last, float* memory) {
    const FewOfIntegers<M> few(product, form, memory);
    for (int64_t column = first; column < last; column += kColumns) few(column, last - column < kColumns ? last - column : kColumns);
}

inline int multiply(const GroupCall& call, const FormOfIntegers& form) {
    const hop_group_product& p = call.p;
    const Weight weight(call);
    const Steps steps(p);
    const Codes codes(p);
    const Order order(p.bits);
    Scratch& of_x = memory_of_x();
    const bool is_few = kFromRegisters && p.m <= kIntegerFew;
    int64_t block = is_few ? p.m : kBlockBytes / steps.of_row() / kIntegerRows * kIntegerRows;
    if (block < 4 * kIntegerRows && !is_few) block = 4 * kIntegerRows;
    if (block > p.m) block = p.m;
    char* memory_of_codes = of_x.get(static_cast<size_t>(block * steps.of_row()));
    if (!memory_of_codes) return HOP_NO_MEMORY;
    const RowsOfCodes x(call, steps, codes.zero(), memory_of_codes);
    const ProductOfIntegers product{call, steps, codes, x};
    const int64_t panels = (p.n + kColumns - 1) / kColumns;
    const int64_t floats = is_few ? FewOfIntegers<kIntegerFew>::floats(weight, steps) : StripOfIntegers::floats(weight, steps);
    const int threads = worth(call.threads, p.n * p.k / 4 * (is_few ? 1 : block), kWorthAThread);
    std::atomic<int> error{HOP_OK};
    for (int64_t first = 0; first < p.m; first += block) {
        const int64_t rows = p.m - first < block ? p.m - first : block;
        if (is_few) weight.begin(0, kBegun), weight.fetch(0, 2 * kColumns);
        for (int64_t i = 0; is_few && i < rows; ++i) x.prepare(i, i, order);
        // For few rows, each thread reads long parts of the weight in order, which memory serves fastest.
        const int64_t part = panels / (4 * threads), grain = is_few ? (part < 64 ? part + 1 : 64) : panels >= 32 * threads ? 4 : 1;
        Queue rows_left(is_few ? 0 : rows, 8), panels_left(panels, threads == 1 ? panels : grain);
        Barrier prepared;
        parallel(threads, [&](int, int team) {
            Scratch& own = memory_of_thread();
            auto* memory = reinterpret_cast<float*>(own.get(static_cast<size_t>(floats) * sizeof(float)));
            if (!memory) error = HOP_NO_MEMORY;
            int64_t begin, end;
            while (rows_left.take(begin, end))
                for (int64_t i = begin; i < end; ++i) x.prepare(first + i, i, order);
            if (!is_few) prepared.wait(team);
            if (!memory) return;
            if (!is_few) {
                const StripOfIntegers strip(product, form, memory);
                while (panels_left.take(begin, end))
                    for (int64_t panel = begin; panel < end; ++panel) strip(panel * kColumns, first, rows);
            } else if constexpr (kFromRegisters) {
                while (panels_left.take(begin, end)) {
                    const int64_t last = end * kColumns < p.n ? end * kColumns : p.n;
                    if (p.m == 1) few_of_integers<1>(product, form, begin * kColumns, last, memory);
                    else few_of_integers<kIntegerFew>(product, form, begin * kColumns, last, memory);
                }
            }
            own.trim();
        });
        if (error) break;
    }
    of_x.trim();
    return error;
}
