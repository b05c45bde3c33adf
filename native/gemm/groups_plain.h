// Sums of groups, for any instruction set. Included in a namespace (isa.h), after epilogue.h.

// Rows begin..end - 1: y (+)= (float(c) · s_lhs) · s_rhs, each operation rounded, after applying zero points to c.
template <class Sum>
inline void add_group(const Job& job, const GroupSums<Sum>& sums, int begin, int end) {
    const Side &lhs = *sums.lhs, &rhs = *sums.rhs;
    centered(job, sums.c, begin, end, lhs, rhs, sums.terms);
    for (int i = begin; i < end; ++i) {
        const Sum* c = sums.c + i * kBlock;
        float *y = sums.y + i * kBlock, s = lhs.scale[i];
        if (sums.first)
            for (int j = 0; j < kBlock; ++j) y[j] = static_cast<float>(c[j]) * s * rhs.scale[j];
        else
            for (int j = 0; j < kBlock; ++j) y[j] = y[j] + static_cast<float>(c[j]) * s * rhs.scale[j];
    }
}
