// Products of int8 codes by weights with a scale for each group of a row. Included in a namespace (isa.h), after
// weight.h, the integers of a level and codes_of_rows.h.
//
//     few rows of x     a row of the weight after the other becomes bytes in registers; sums of 16 groups are found at once,
//                       and multiplied by their scales; the terms of 16 rows of the weight are then added up together
//     many              16 rows of the weight become a strip of bytes, four of each in turn, and each register holds the sums
//                       of 16 rows for a row of x
//
// Sums of integers are exact, and what is done in floats is the same both ways, at every level.

constexpr int64_t kColumns = 16;         // rows of the weight at once
constexpr int64_t kIntegersFetched = 8 << 10;  // bytes of codes that are fetched before few rows read them
constexpr int64_t kBegun = 2 << 10;            // and while rows of x are prepared

// The bytes of block b of a row of the weight, of which the last may have fewer than four chunks.
template <class F>
HOP_INLINED inline Block block_of(const Codes<F::kBits>& codes, const uint8_t* low, const uint8_t* high, int64_t b, int64_t chunks) {
    constexpr int64_t bytes = codes_of_chunk(F::kBits), more = high_of_chunk(F::kBits);
    low += 4 * b * bytes, high += 4 * b * more;
    if (4 * b + 4 <= chunks) return codes(low, high);
    uint8_t own[4 * bytes + 1] = {}, own_high[4 * more + 1] = {};
    const auto rest = static_cast<size_t>(chunks - 4 * b);
    std::memcpy(own, low, rest * bytes);
    if (more) std::memcpy(own_high, high, rest * more);
    return codes(own, own_high);
}

// What is done in floats: (float32(sum) · scale of x) · scale, less (float32(sum of x) · scale of x) · offset.
template <class F>
HOP_INLINED inline Lanes term(Lanes sum, Lanes x_scale, Lanes x_sum, Lanes scale, const float* offset) {
    const Lanes product = times(times(sum, x_scale), scale);
    return F::kOffset ? minus(product, times(x_sum, load(offset))) : product;
}

// ---- few rows of x

// Asks for the lines that lie ahead of 16 units: their codes and high bits.
template <class F>
HOP_INLINED inline void fetch_ahead(const uint8_t* low, const uint8_t* high) {
    constexpr int64_t chunks = 4 * Steps<F>::kBlocks, bytes = chunks * codes_of_chunk(F::kBits), more = chunks * high_of_chunk(F::kBits);
    HOP_UNROLL
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(low + line + kIntegersFetched, 0, 3);
    HOP_UNROLL
    for (int64_t line = 0; line < more; line += 64) __builtin_prefetch(high + line + kIntegersFetched, 0, 3);
}

// The sums of bytes of 16 units, of which `chunks` are there: all of them where they are `Whole`. Codes of x begin with theirs.
template <class F, int Rows, bool Whole>
HOP_INLINED inline void sum_units(const Codes<F::kBits>& codes, const uint8_t* low, const uint8_t* high, int64_t chunks,
                                  const int8_t* const (&x)[Rows], int64_t at, Ints (&sums)[Rows]) {
    constexpr int64_t blocks = Steps<F>::kBlocks;
    Ints e[Rows][blocks];
    fetch_ahead<F>(low, high);
    HOP_UNROLL
    for (int b = 0; b < blocks; ++b) {
        HOP_UNROLL
        for (int i = 0; i < Rows; ++i) e[i][b] = all_ints(0);
        if (!Whole && 4 * b >= chunks) continue;
        const Block w = block_of<F>(codes, low, high, b, Whole ? 4 * b + 4 : chunks);
        HOP_UNROLL
        for (int i = 0; i < Rows; ++i) e[i][b] = codes.dot(e[i][b], w, x[i] + at + b * kBlock);
    }
    HOP_UNROLL
    for (int i = 0; i < Rows; ++i) {
        if constexpr (F::kPairs) sums[i] = sums_of_halves(e[i]);
        else sums[i] = sums_of_chunks(e[i]);
    }
}

// The terms of a row of the weight by one of x where several units share scales. `sums` is memory for those of units.
template <class F>
HOP_ALONE void of_steps(const Codes<F::kBits>& codes, const Steps<F>& steps, const uint8_t* low, const uint8_t* high, RowScales s,
                        const RowOfCodes& x, int32_t* sums, float* terms) {
    const int8_t* const own[] = {x.codes};
    constexpr int64_t each = 4 * Steps<F>::kBlocks;  // chunks of 16 units
    for (int64_t unit = 0, chunk = 0; unit < steps.units; unit += 16, chunk += each) {
        Ints found[1];
        sum_units<F, 1, false>(codes, low + chunk * codes_of_chunk(F::kBits), high + chunk * high_of_chunk(F::kBits),
                               steps.chunks - chunk, own, chunk * kChunk, found);
        store_ints(sums + unit, found[0]);
    }
    for (int64_t step = 0; step < steps.count; ++step) {
        const int64_t first = step * steps.each, last = first + steps.each;
        auto total = static_cast<uint32_t>(x.added[step]);
        for (int64_t unit = first; unit < last && unit < steps.units; ++unit) total += static_cast<uint32_t>(sums[unit]);
        float product = static_cast<float>(static_cast<int32_t>(total)) * x.scale[step] * s.scale[first];
        if (F::kOffset) product -= x.sum[step] * s.offset[first];
        terms[step] = product;
    }
}

// The results of a row of x by 16 rows of the weight, whose terms lie `apart`.
HOP_ALONE inline void add_up(const float* terms, int64_t apart, int64_t count, float* results) {
    alignas(64) float square[16 * kColumns];
    constexpr int64_t few = 4;  // that are added one by one in less time than 16 are turned
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

template <class F, int M>
class FewOfIntegers {
public:
    FewOfIntegers(const GroupCall& call, const Steps<F>& steps, const Codes<F::kBits>& codes, const RowsOfCodes<F>& x, float* memory)
        : call_(call), steps_(steps), codes_(codes), weight_(call), scales_(memory), terms_(memory + weight_.floats(kColumns)),
          sums_(reinterpret_cast<int32_t*>(terms_ + M * kColumns * steps.padded)), ahead_(kIntegersFetched / weight_.bytes() + kColumns) {
        for (int i = 0; i < M; ++i) x_[i] = x[i < call.p.m ? i : call.p.m - 1];
    }
    static int64_t floats(const Weight& weight, const Steps<F>& steps) {
        return weight.floats(kColumns) + M * kColumns * steps.padded + steps.padded;
    }

    void operator()(int64_t column, int64_t columns) const {
        weight_.fetch(column + ahead_, columns);
        weight_.find(column, columns, scales_);
        int64_t apart = steps_.padded;  // terms of rows of the weight
        if (steps_.each == 1) {
            if (steps_.chunks % 4 == 0 && columns * steps_.units % 16 == 0) apart = steps_.units;
            of_units(column, columns, apart);
        } else {
            for (int64_t j = 0; j < columns; ++j)
                for (int i = 0; i < M && i < call_.p.m; ++i)
                    of_steps(codes_, steps_, weight_.codes(column + j), weight_.high(column + j), weight_.found(j, columns, scales_), x_[i], sums_, terms(i) + j * apart);
        }
        const Results results(call_);
        for (int i = 0; i < M && i < call_.p.m; ++i) {
            float numbers[kColumns];
            add_up(terms(i), apart, steps_.count, numbers);
            for (int64_t j = 0; j < columns; ++j) results.put(i, column + j, numbers[j]);
        }
    }

private:
    float* terms(int i) const { return terms_ + i * kColumns * steps_.padded; }

    // The terms of some rows where each unit has its scales, `apart` of them from row to row. Rows lie one after the other, and
    // so do their scales: where each is of whole blocks, and all of them are of whole sixteens of units, 16 units may end
    // one row and begin the next. What it reads are its own copies, which stay in registers.
    HOP_ALONE void of_units(int64_t column, int64_t columns, int64_t apart) const {
        const Codes<F::kBits> codes = codes_;
        constexpr int64_t each = 4 * Steps<F>::kBlocks;  // chunks of 16 units
        const bool is_one = apart == steps_.units;
        const int64_t rows = is_one ? 1 : columns, chunks = is_one ? columns * steps_.chunks : steps_.chunks, units = steps_.units;
        const int8_t* x[M];
        const int32_t* added[M];
        const float *x_scale[M], *x_sum[M];
        float* to[M];
        for (int i = 0; i < M; ++i) x[i] = x_[i].codes, added[i] = x_[i].added, x_scale[i] = x_[i].scale, x_sum[i] = x_[i].sum, to[i] = terms(i);
        for (int64_t j = 0; j < rows; ++j) {
            const uint8_t *low = weight_.codes(column + j), *high = weight_.high(column + j);
            const RowScales s = weight_.found(j, columns, scales_);
            int64_t unit = 0;  // of a row of x
            const auto take = [&](auto whole, int64_t chunk, int64_t at) HOP_INLINED {
                Ints found[M];
                sum_units<F, M, decltype(whole)::value>(codes, low + chunk * codes_of_chunk(F::kBits), high + chunk * high_of_chunk(F::kBits),
                                                        chunks - chunk, x, unit * Steps<F>::kUnit, found);
                const Lanes scale = load(s.scale + at);
                HOP_UNROLL
                for (int i = 0; i < M; ++i) {
                    const Lanes sum = to_floats(plus_ints(found[i], load_ints(added[i] + unit)));
                    store(to[i] + at, term<F>(sum, load(x_scale[i] + unit), load(x_sum[i] + unit), scale, s.offset + at));
                }
            };
            int64_t chunk = 0, at = 0;
            for (; chunk + each <= chunks; chunk += each, at += 16) {
                take(std::true_type{}, chunk, at);
                unit += 16;
                while (unit >= units) unit -= units;
            }
            if (chunk < chunks) take(std::false_type{}, chunk, at);
            for (int i = 0; i < M; ++i) to[i] += apart;
        }
    }

    const GroupCall& call_;
    const Steps<F>& steps_;
    const Codes<F::kBits>& codes_;
    const Weight weight_;
    RowOfCodes x_[M];
    float *scales_, *terms_;  // terms of rows of x by rows of the weight
    int32_t* sums_;           // of units
    int64_t ahead_;           // rows of the weight, of which scales are fetched
};

// ---- many rows

template <class F>
class StripOfIntegers {
public:
    StripOfIntegers(const GroupCall& call, const Steps<F>& steps, const Codes<F::kBits>& codes, const RowsOfCodes<F>& x, float* memory)
        : call_(call), steps_(steps), codes_(codes), weight_(call), x_(x), found_(memory), scales_(memory + weight_.floats(kColumns)),
          offsets_(scales_ + kColumns * steps.padded), rows_(reinterpret_cast<uint8_t*>(offsets_ + kColumns * steps.padded)),
          strip_(rows_ + kColumns * steps.bytes) {}
    static int64_t floats(const Weight& weight, const Steps<F>& steps) {
        return weight.floats(kColumns) + 2 * kColumns * steps.padded + kColumns * steps.bytes / 2;
    }

    // Rows of x from `first` on, of which the first is row 0 here.
    void operator()(int64_t column, int64_t first, int64_t rows) const {
        const int64_t rest = call_.p.n - column, columns = rest < kColumns ? rest : kColumns;
        decode(column, columns);
        int64_t i = 0;
        for (; i + kIntegerRows <= rows; i += kIntegerRows) tile<kIntegerRows>(i, first, column, columns);
        for (; i + 2 <= rows; i += 2) tile<2>(i, first, column, columns);
        if (i < rows) tile<1>(i, first, column, columns);
    }

private:
    HOP_ALONE void decode(int64_t column, int64_t columns) const {
        weight_.find(column, columns, found_);
        for (int64_t j = 0; j < kColumns; ++j) {
            uint8_t* row = rows_ + j * steps_.bytes;
            if (j >= columns) {
                std::memset(row, 0, static_cast<size_t>(steps_.bytes));
                continue;
            }
            const uint8_t *low = weight_.codes(column + j), *high = weight_.high(column + j);
            for (int64_t b = 0; b * kBlock < steps_.bytes; ++b) {
                const Block w = block_of<F>(codes_, low, high, b, steps_.chunks);
                store_bytes(row + b * kBlock, w.first), store_bytes(row + b * kBlock + 64, w.second);
            }
        }
        for (int64_t at = 0; at < steps_.bytes; at += 64) turn(rows_ + at, steps_.bytes, strip_ + at * kColumns);
        for (int64_t j = 0; j < kColumns; ++j) {
            const RowScales s = weight_.found(j < columns ? j : columns - 1, columns, found_);
            for (int64_t step = 0; step < steps_.count; ++step) {
                scales_[step * kColumns + j] = s.scale[step * steps_.each];
                if (F::kOffset) offsets_[step * kColumns + j] = s.offset[step * steps_.each];
            }
        }
    }

    template <int M>
    HOP_ALONE void tile(int64_t row, int64_t first, int64_t column, int64_t columns) const {
        RowOfCodes x[M];
        Lanes y[M];
        for (int i = 0; i < M; ++i) x[i] = x_[row + i];
        for (int64_t step = 0; step < steps_.count; ++step) {
            Ints sums[M];
            HOP_UNROLL
            for (int i = 0; i < M; ++i) sums[i] = all_ints(x[i].added[step]);
            const int64_t begin = step * steps_.each, last = begin + steps_.each < steps_.units ? begin + steps_.each : steps_.units;
            for (int64_t unit = begin; unit < last; ++unit) of_unit<M>(unit, x, sums);
            const Lanes scale = load(scales_ + step * kColumns);
            HOP_UNROLL
            for (int i = 0; i < M; ++i) {
                const Lanes own = term<F>(to_floats(sums[i]), all(x[i].scale[step]), all(x[i].sum[step]), scale, offsets_ + step * kColumns);
                y[i] = step ? plus(y[i], own) : own;
            }
        }
        const Results results(call_);
        for (int i = 0; i < M; ++i) {
            float numbers[kColumns];
            store(numbers, y[i]);
            for (int64_t j = 0; j < columns; ++j) results.put(first + row + i, column + j, numbers[j]);
        }
    }

    template <int M>
    HOP_INLINED void of_unit(int64_t unit, const RowOfCodes (&x)[M], Ints (&sums)[M]) const {
        constexpr int64_t per_chunk = F::kPairs ? 2 : 1, quads = 4 / per_chunk;
        const int64_t chunk = unit / per_chunk, at = chunk / 4 * kBlock + chunk % 4 * 16 + unit % per_chunk * 8;
        HOP_UNROLL
        for (int64_t second = 0; second < 2; ++second)
            HOP_UNROLL
            for (int64_t quad = 0; quad < quads; ++quad) {
                const int64_t place = at + second * 64 + quad * 4;
                const Bytes w = load_bytes(strip_ + place * kColumns);
                HOP_UNROLL
                for (int i = 0; i < M; ++i) sums[i] = codes_.quad(sums[i], w, x[i].codes + place);
            }
    }

    const GroupCall& call_;
    const Steps<F>& steps_;
    const Codes<F::kBits>& codes_;
    const Weight weight_;
    const RowsOfCodes<F>& x_;
    float *found_, *scales_, *offsets_;  // by rows of the weight, and by steps
    uint8_t *rows_, *strip_;
};

// ---- a call

template <class F, int M>
void few_of_integers(const GroupCall& call, const Steps<F>& steps, const Codes<F::kBits>& codes, const RowsOfCodes<F>& x,
                     int64_t first, int64_t last, float* memory) {
    const FewOfIntegers<F, M> few(call, steps, codes, x, memory);
    for (int64_t column = first; column < last; column += kColumns) few(column, last - column < kColumns ? last - column : kColumns);
}

template <class F>
int multiply_integers(const GroupCall& call) {
    const hop_group_product& p = call.p;
    const Weight weight(call);
    const Steps<F> steps(p);
    const Codes<F::kBits> codes(p);
    const Order<F::kBits> order;
    Scratch& of_x = memory_of_x();
    const bool is_few = p.m <= kIntegerFew;
    int64_t block = is_few ? p.m : kBlockBytes / steps.of_row() / kIntegerRows * kIntegerRows;
    if (block < 4 * kIntegerRows && !is_few) block = 4 * kIntegerRows;
    if (block > p.m) block = p.m;
    char* memory_of_codes = of_x.get(static_cast<size_t>(block * steps.of_row()));
    if (!memory_of_codes) return HOP_NO_MEMORY;
    const RowsOfCodes<F> x(call, steps, codes.zero(), memory_of_codes);
    const int64_t panels = (p.n + kColumns - 1) / kColumns;
    const int64_t floats = is_few ? FewOfIntegers<F, kIntegerFew>::floats(weight, steps) : StripOfIntegers<F>::floats(weight, steps);
    const int threads = worth(call.threads, p.n * p.k / 4 * (is_few ? 1 : block), kWorthAThread);
    std::atomic<int> error{HOP_OK};
    for (int64_t first = 0; first < p.m; first += block) {
        const int64_t rows = p.m - first < block ? p.m - first : block;
        if (is_few) weight.begin(0, kBegun), weight.fetch(0, 2 * kColumns);
        for (int64_t i = 0; is_few && i < rows; ++i) x.prepare(i, i, order);
        // Few rows read a weight in order, as memory gives it fastest: long parts of it by each thread.
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
            if (is_few) {
                while (panels_left.take(begin, end)) {
                    const int64_t last = end * kColumns < p.n ? end * kColumns : p.n;
                    if (p.m == 1) few_of_integers<F, 1>(call, steps, codes, x, begin * kColumns, last, memory);
                    else few_of_integers<F, kIntegerFew>(call, steps, codes, x, begin * kColumns, last, memory);
                }
            } else {
                const StripOfIntegers<F> strip(call, steps, codes, x, memory);
                while (panels_left.take(begin, end))
                    for (int64_t panel = begin; panel < end; ++panel) strip(panel * kColumns, first, rows);
            }
            own.trim();
        });
        if (error) break;
    }
    of_x.trim();
    return error;
}

int run(const GroupCall& call) {
    return by_form(call.p, [&call](auto form) { return multiply_integers<decltype(form)>(call); });
}
