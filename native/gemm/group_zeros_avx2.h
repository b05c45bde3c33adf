// Zero points of groups of 4-bit codes. Included in a namespace (isa.h), after scales.h and vectors_avx2.h or _avx512.h.

// The zero points of `Vectors` times V::kLanes rows of rhs, from row `first` on, 0 for missing rows. Groups are visited in
// order. If a row's zero points are contiguous, those of four groups are loaded at a time.
template <int Vectors>
class GroupZeros {
public:
    GroupZeros(const Job& job, int64_t first)
        : job_(job), first_(first), rest_(job.p.n - first), is_signed_(job.p.rhs.zero_format == HOP_INT8) {
        const hop_scale& s = job.p.rhs.scale;
        is_stored_ = job.p.rhs.zero_format != HOP_NONE;
        together_ = is_stored_ && s.rows == 1 && s.k_stride == 1 && s.ks == job.group;
        if (!is_stored_) load(0);
    }

    void at(int64_t group, V::Words (&zeros)[Vectors]) {
        if (together_ ? group % 4 == 0 : is_stored_) load(group);
        for (int i = 0; i < Vectors; ++i) {
            zeros[i] = V::words(words_ + i * V::kLanes);
            if (!together_) continue;
            const V::Words top = V::left(zeros[i], 24 - static_cast<int>(group % 4) * 8);
            zeros[i] = is_signed_ ? V::signed_right(top, 24) : V::right(top, 24);
        }
    }

private:
    HOP_ALONE void load(int64_t group) {
        constexpr int64_t most = Vectors * V::kLanes;
        const int64_t rows = rest_ < most ? rest_ : most;
        if (!together_) return load_zeros(job_.p.rhs, job_.rhs.zero, first_, rows, group * job_.group, words_);
        const int64_t stride = job_.p.rhs.scale.row_stride;
        const auto* from = static_cast<const uint8_t*>(job_.rhs.zero) + first_ * stride + group;
        if (job_.groups - group < 4)
            for (int64_t i = 0; i < rows; ++i) std::memcpy(words_ + i, from + i * stride, static_cast<size_t>(job_.groups - group));
        else
            for (int64_t i = 0; i < rows; ++i) std::memcpy(words_ + i, from + i * stride, 4);
    }

    const Job& job_;
    int64_t first_, rest_;
    bool is_signed_, is_stored_ = false, together_ = false;
    alignas(64) int32_t words_[Vectors * V::kLanes] = {};
};

struct NoZeros {
    NoZeros(const Job&, int64_t) {}
};
