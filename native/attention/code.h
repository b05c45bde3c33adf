// The kernels of attention (attention.h) at one level.
namespace {
#include "quantize/numbers.h"
#include "gemm/row_blocks.h"
#include "attention/lanes.h"
#include HOP_HEADER(attention/dots)
#include "attention/pack.h"
#if defined(HOP_IN_AVX2)
#include "attention/few_avx2.h"
#elif defined(HOP_IN_AVX_VNNI)
using avx2::evaluate;
#endif
#include "attention/probabilities.h"
#include "attention/run.h"
}  // namespace

int attend(const AttentionCall& c) {
    const hop_attention& a = c.a;
    const int64_t groups = a.heads / a.key_heads, all_rows = a.queries * groups, heads = a.batch * a.key_heads;
    constexpr int64_t kWorth = 256;  // rows that justify packing keys and values once more
    const int64_t wanted = least(divide_up(4 * c.threads, heads), divide_up(all_rows, kWorth));
    const int64_t parts = c.threads > 1 && heads % c.threads ? wanted : 1, per_part = divide_up(all_rows, parts);
    const int threads = worth(c.threads, all_rows * heads * a.keys * (a.width + a.value_width), 1 << 20);
    std::atomic<int> result{HOP_OK};
    Queue queue(heads * parts);
    parallel(threads, [&](int, int) {
        AttentionRoom room(a);
        char* memory = scratch(room.size);
        if (!memory) {
            result = HOP_NO_MEMORY;
            return;
        }
        room.place(memory);
        for (int64_t item, end; queue.take(item, end);) {
            const int64_t batch = item / parts / a.key_heads, head = item / parts % a.key_heads;
            const int64_t first = item % parts * per_part, last = least(all_rows, first + per_part);
            const auto own = [&](int64_t at) { return row_of(c, batch, head * groups + at / a.queries, at % a.queries); };
            int64_t most = 0;
            for (int64_t at = first; at < last && most < a.keys; ++at) {
                const int64_t keys = own(at).keys;
                most = keys > most ? keys : most;
            }
            take_head(c, room, batch, head, most);
            for (int64_t at = first; at < last; at += room.rows) {
                AttentionRow row[AttentionRoom::kMost];
                const int rows = int(least(room.rows, last - at));
                for (int i = 0; i < rows; ++i) row[i] = own(at + i);
                attend_block(c, room, batch, row, rows);
            }
        }
    });
    return result;
}
