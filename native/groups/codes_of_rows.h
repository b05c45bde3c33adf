// Rows of x for integer products: codes in the order of a weight's codes, and the values that each step needs besides
// its sum. Included in a namespace (isa.h), after weight.h and the integers of a level.

// The steps of k: ranges in which no scale changes. A unit is a chunk, or half of one if groups are half chunks.
struct Steps {
    static constexpr int64_t kMore = 3 * kBlock;  // codes repeated after a row's end: 16 units may begin near it
    bool pairs;
    int64_t unit, chunks, units, padded, held, step, count, each, bytes;

    explicit Steps(const hop_group_product& p)
        : pairs(p.scales.group < kChunk), unit(pairs ? kChunk / 2 : kChunk), chunks(p.k / kChunk), units(p.k / unit), padded((units + 15) / 16 * 16), held(padded + 16), step(step_of(p)),
          count((p.k + step - 1) / step), each(step / unit), bytes((p.k + kBlock - 1) / kBlock * kBlock) {}

    int64_t of_row() const { return bytes + kMore + 3 * held * 4; }
    static int64_t step_of(const hop_group_product& p) {
        const int64_t own = p.x_group && p.x_group < p.k ? p.x_group : p.k;
        return own < p.scales.group ? own : p.scales.group;
    }
};

// A row of x: codes; and for each step the correction of sums with unsigned weight bytes, the scale, and the scale
// times the sum of codes. All of them are repeated after the end.
struct RowOfCodes {
    const int8_t* codes;
    const int32_t* added;
    const float *scale, *sum;
};

class RowsOfCodes {
public:
    RowsOfCodes(const GroupCall& call, const Steps& steps, int zero, char* memory)
        : p_(call.p), steps_(steps), x_(static_cast<const int8_t*>(call.x)), scales_(call.x_scale), zero_(zero), memory_(memory),
          own_(p_.x_group && p_.x_group < p_.k ? p_.x_group : p_.k), of_row_((p_.k + own_ - 1) / own_) {}

    RowOfCodes operator[](int64_t i) const {
        const char* at = memory_ + i * steps_.of_row();
        const auto* numbers = reinterpret_cast<const float*>(at + steps_.bytes + steps_.kMore);
        return {reinterpret_cast<const int8_t*>(at), reinterpret_cast<const int32_t*>(numbers), numbers + steps_.held, numbers + 2 * steps_.held};
    }

    // Converts row `row` of x to row i.
    HOP_ALONE void prepare(int64_t row, int64_t i, const Order& order) const {
        char* at = memory_ + i * steps_.of_row();
        auto* codes = reinterpret_cast<int8_t*>(at);
        auto* added = reinterpret_cast<int32_t*>(at + steps_.bytes + steps_.kMore);
        auto *scale = reinterpret_cast<float*>(added + steps_.held), *sum = scale + steps_.held;
        const int8_t* own = x_ + row * p_.k;
        int64_t k = 0;
        for (; k + kBlock <= p_.k; k += kBlock) order(own + k, codes + k);
        if (k < p_.k) {
            int8_t last[kBlock] = {};
            std::memcpy(last, own + k, static_cast<size_t>(p_.k - k));
            order(last, codes + k);
        }
        for (k = 0; k < steps_.kMore; k += kBlock) std::memcpy(codes + steps_.bytes + k, codes + k % steps_.bytes, kBlock);
        for (int64_t s = 0; s < steps_.count; ++s) {
            uint32_t total = 0;
            const int64_t first = s * steps_.step, last = first + steps_.step < p_.k ? first + steps_.step : p_.k;
            for (int64_t unit = first; unit < last; unit += 16) {
                int32_t part = 0;
                for (int j = 0; j < 16; ++j) part += own[unit + j];
                total += static_cast<uint32_t>(part);
            }
            added[s] = static_cast<int32_t>(0 - total * static_cast<uint32_t>(zero_));
            scale[s] = scales_[row * of_row_ + first / own_];
            sum[s] = static_cast<float>(static_cast<int32_t>(total)) * scale[s];
        }
        for (int64_t s = steps_.count; s < steps_.held; ++s)
            added[s] = added[s - steps_.count], scale[s] = scale[s - steps_.count], sum[s] = sum[s - steps_.count];
    }

private:
    const hop_group_product& p_;
    const Steps& steps_;
    const int8_t* x_;
    const float* scales_;
    int zero_;
    char* memory_;
    int64_t own_, of_row_;  // elements per scale of x, and scales per row
};
