// Sums of groups that stay in registers, from the products to y. Included in a namespace (isa.h), after groups_avx512.h
// and the Numbers of an engine.

// Processes rows first..first + N - 1. Like add_group of groups_plain.h, bit for bit: each operation is rounded, and
// groups are added in order. Paired: zero points are included in the initial sums; `scaled`: lhs has scales. For integers
// y stays in registers. For floats it stays in memory, for twice as many rows: fewer accumulators would be limited by
// latency on CPUs that start two multiply-adds per cycle.
template <class Numbers, int N, bool Paired, class Between>
inline void kept_groups(const KeptGroups& g, int first, bool scaled, const Between& between) {
    constexpr int64_t row_bytes = Numbers::kLhsBytes * kSlice, slice_bytes = 2 * Numbers::kBytes * kTile;
    constexpr bool held = Numbers::kBytes == 1;
    const __m512 none = _mm512_set1_ps(-0.f);  // -0 + x is x for every x
    float* out = g.y + first * kBlock;
    __m512 y[held ? N : 1][2];
    for (int i = 0; !held && g.first && i < N * kBlock; i += kRows) _mm512_storeu_ps(out + i, none);
    HOP_UNROLL
    for (int i = 0; i < (held ? N : 0); ++i) {
        HOP_UNROLL
        for (int half = 0; half < 2; ++half) y[i][half] = g.first ? none : _mm512_loadu_ps(out + i * kBlock + half * kRows);
    }
    const uint8_t *a = g.a + first * row_bytes, *b = g.b;
    int quad = 0;
    int64_t rest = g.slices;
    for (int64_t group = 0; group < g.groups; ++group) {
        const Side &lhs = g.lhs[group * g.lhs_step], &rhs = g.rhs[group];
        typename Numbers::Vector c[1][N][2];
        HOP_UNROLL
        for (int i = 0; i < N; ++i) {
            HOP_UNROLL
            for (int half = 0; half < 2; ++half) {
                if constexpr (Paired)
                    c[0][i][half] = _mm512_madd_epi16(_mm512_set1_epi32(lhs.pair[first + i]), load512(rhs.pair + half * kRows));
                else c[0][i][half] = Numbers::zero();
            }
        }
        for (int64_t slices = rest < g.span ? rest : g.span; slices > 0; --slices) {
            const int end = quad + g.quads;
            for (; quad < end; quad += 4) {
                HOP_UNROLL
                for (int i = 0; i < 4; ++i) Numbers::template quad<N, 1>(a, b, quad + i, c);
            }
            if (quad == kQuads) quad = 0, --rest, a += g.stride, b += slice_bytes;
        }
        HOP_UNROLL
        for (int i = 0; i < N; ++i) {
            __m512 left = Numbers::number(c[0][i][0]), right = Numbers::number(c[0][i][1]);
            if (held || scaled) {
                const __m512 scale = _mm512_set1_ps(lhs.scale[first + i]);
                left = _mm512_mul_ps(left, scale), right = _mm512_mul_ps(right, scale);
            }
            left = _mm512_mul_ps(left, _mm512_load_ps(rhs.scale)), right = _mm512_mul_ps(right, _mm512_load_ps(rhs.scale + kRows));
            if constexpr (held) {
                y[i][0] = _mm512_add_ps(y[i][0], left), y[i][1] = _mm512_add_ps(y[i][1], right);
            } else {
                float* own = out + i * kBlock;
                _mm512_storeu_ps(own, _mm512_add_ps(_mm512_loadu_ps(own), left));
                _mm512_storeu_ps(own + kRows, _mm512_add_ps(_mm512_loadu_ps(own + kRows), right));
            }
        }
        between();
    }
    HOP_UNROLL
    for (int i = 0; i < (held ? N : 0); ++i) {
        HOP_UNROLL
        for (int half = 0; half < 2; ++half) _mm512_storeu_ps(out + i * kBlock + half * kRows, y[i][half]);
    }
}

// Whether the sums of a product's groups can stay in registers.
inline bool keeps_groups(const Job& job) {
    const bool zeros = by_integers(job.p) && (lhs_has_zero(job) || has_zero(job.p.rhs));
    return job.grouped() && (!zeros || are_paired(job));
}

template <class Numbers, class Between>
inline void keep_groups(const Job& job, const KeptGroups& g, int rows, Between& between) {
    constexpr bool integers = Numbers::kBytes == 1;
    constexpr int most = integers ? 6 : 12;  // rows at a time: 12 registers of sums and 12 of y, or 24 of sums
    in_row_blocks<most>(rows, [&](auto n, int first) {
        const auto once = [&] { if (first == 0) between(); };
        if constexpr (integers) {
            if (lhs_has_zero(job) || has_zero(job.p.rhs)) kept_groups<Numbers, n.value, true>(g, first, true, once);
            else kept_groups<Numbers, n.value, false>(g, first, true, once);
        } else {
            kept_groups<Numbers, n.value, false>(g, first, job.p.lhs.scale.format != HOP_NONE, once);
        }
    });
}
