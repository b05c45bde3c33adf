"""Mistakes on the way of the results through shared memory."""

from tests.mutations.patterns import DRAIN, EVERY, TOGETHER, UNFENCED, UNREAD, WRONG
from tests.mutations.record import Edit, Mutation

RESULTS: dict[str, Mutation] = {
    "columns' values read before they are written": Mutation(
        "swapped",
        "a warp is ahead of those that share its columns' scales",
        (Edit(TOGETHER, which=(1, 2)),),
        WRONG,
        ("prompt", "late_loads", "reordered_loads", "late_stores", "late_products", "first_ahead", "impatient"),
    ),
    "columns' values overwritten before they are read": Mutation(
        "swapped",
        "a warp is a tile ahead of those that still read its columns' scales",
        (Edit(TOGETHER, which=(0, 1)),),
        WRONG,
        ("first_ahead", "others_stop"),
    ),
    "store not waited for": Mutation(
        "cooperative",
        "a part of the result is overwritten before the copy engine has read it",
        (Edit(DRAIN),),
        WRONG,
        ("late_stores",),
    ),
    "store waited for one too late": Mutation(
        "cooperative",
        "a part of the result is overwritten before the copy engine has read it",
        (Edit(DRAIN, "\tcp.async.bulk.wait_group.read \t2;\n"),),
        WRONG,
        ("late_stores",),
    ),
    "stores not committed": Mutation(
        "cooperative",
        "wait_group waits for nothing",
        (Edit(r"^\tcp\.async\.bulk\.commit_group;\n"),),
        UNREAD,
        ("late_stores",),
    ),
    "only one thread waits for the store": Mutation(
        "cooperative",
        "the other threads overwrite what the copy engine still reads",
        (Edit(TOGETHER, which=(2, None, 2)),),
        UNFENCED,
        ("late_stores",),
    ),
    "store waited for after the barrier": Mutation(
        "cooperative",
        "the other threads overwrite what the copy engine still reads",
        (
            Edit(
                DRAIN + r"(\$L\S+:\n)(\tsetp\.ne\.b32 \t(%p\d+),.*\n)(" + TOGETHER[1:] + ")",
                r"\1\2\4\t@!\3 cp.async.bulk.wait_group.read \t1;\n",
            ),
        ),
        WRONG,
        ("late_stores+first_ahead",),
    ),
    "store before all have written": Mutation(
        "cooperative",
        "the copy engine reads a part of which some warps have not written theirs",
        (Edit(TOGETHER, which=(3, None, 2)),),
        WRONG,
        ("first_ahead", "last_ahead", "others_stop"),
    ),
    "no proxy fence": Mutation(
        "cooperative",
        "the copy engine does not see what threads have written",
        (Edit(r"^\tfence\.proxy\.async.*\n"),),
        UNFENCED,
        EVERY,
    ),
    "proxy fence after the barrier": Mutation(
        "cooperative",
        "the copy engine is asked before other warps' fences",
        (Edit(r"^(\tfence\.proxy\.async.*\n)(\tbar\.sync.*\n)", r"\2\1"),),
        UNFENCED,
        ("first_ahead", "others_stop"),
    ),
    "consumers share a barrier": Mutation(
        "cooperative",
        "warps of one consumer count for those of the other",
        (Edit(TOGETHER, "\tbar.sync \t3, 128;\n"),),
        UNFENCED,
        ("late_stores",),
    ),
    "barrier of half the warps": Mutation(
        "cooperative",
        "two of a consumer's warps pass without the others",
        (Edit(TOGETHER, r"\tbar.sync \t\1, 64;\n"),),
        "|".join((WRONG, UNFENCED)),
        ("late_stores", "first_ahead", "last_ahead", "others_stop"),
    ),
    "last store not waited for": Mutation(
        "cooperative",
        "a block ends, and its shared memory is another's, before the copy engine has read it",
        (Edit(r"^\tcp\.async\.bulk\.wait_group\.read \t0;\n"),),
        UNREAD,
        ("late_stores",),
    ),
}
