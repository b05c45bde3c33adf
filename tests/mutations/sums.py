"""Mistakes of blocks that share a sum along K: its bytes, who waits for whom."""

from tests.mutations.patterns import ENDED, EVERY, HANGS, MISCOUNTED, UNREAD, WAIT, WRONG
from tests.mutations.record import Edit, Mutation

# The waits at the end of the consumers' code: for the last sums to be taken, for sums to come (one of each owner), for
# those of the last tile to be taken.
TAKEN, GATHERED, LAST = (-4, -3), (-3, -1), (-1, None)
SENT = r"^\tmapa\S+ (\t%r\d+, %r\d+), ([01]);\n"

SUMS: dict[str, Mutation] = {
    "sums added before they have come": Mutation(
        "split",
        "a block adds what is in its shared memory before others' sums are",
        (Edit(WAIT, part="consumers", which=GATHERED),),
        "|".join((HANGS, WRONG, MISCOUNTED)),
        ("late_loads", "reordered_loads", "first_ahead", "last_ahead", "others_stop"),
    ),
    "sums sent before the last are taken": Mutation(
        "split",
        "sums are overwritten that an owner has not read",
        (Edit(WAIT, part="consumers", which=TAKEN),),
        "|".join((WRONG, UNREAD)),
        ("late_loads", "reordered_loads", "last_ahead", "others_stop"),
    ),
    "sums taken before they are read": Mutation(
        "split",
        "sums are overwritten that an owner is about to read",
        (
            Edit(
                r"^(\tld\.shared\.v4(?:.*\n)*?)\tmbarrier\.arrive\.shared::cluster\.b64 _, (\[%r\d+\]), %r\d+;\n",
                r"\tmbarrier.arrive.shared::cluster.b64 _, \2, 1;\n\1",
            ),
        ),
        WRONG,
        ("others_stop",),
    ),
    "a block ends before its sums are taken": Mutation(
        "split",
        "an owner signals a block that has ended",
        (Edit(WAIT, part="consumers", which=LAST),),
        ENDED,
        ("late_loads", "reordered_loads", "last_ahead", "others_stop"),
    ),
    "bytes of half the sums": Mutation(
        "split",
        "an owner adds sums of which half are on their way",
        (Edit(r"^(\tmov\.b32 \t%r\d+), 8192;\n(?=\tmbarrier\.arrive\.expect_tx)", r"\1, 4096;\n", "consumers"),),
        "|".join((HANGS, WRONG)),
        EVERY,
    ),
    "bytes of the sums not announced": Mutation(
        "split",
        "an owner adds sums that are on their way",
        (
            Edit(
                r"^\tmbarrier\.arrive\.expect_tx(\S+ %rd\d+, \[%r\d+\]), %r\d+;",
                r"\tmbarrier.arrive\1, 1;",
                "consumers",
            ),
        ),
        "|".join((HANGS, WRONG)),
        EVERY,
    ),
    "sums kept to oneself": Mutation(
        "split",
        "the owner waits for sums that never come",
        (Edit(SENT, r"\tmov.b32 \1;\n"),),
        "|".join((HANGS, WRONG)),
        EVERY,
    ),
    "taken by one owner": Mutation(
        "split",
        "sums are overwritten that the other owner has not read",
        (Edit(r"^(\tmov\.b32 \t%r\d+), 128;\n(?=\tmbarrier\.init)", r"\1, 64;\n"),),
        "|".join((HANGS, UNREAD)),
        EVERY,
    ),
    "taken by more than there are": Mutation(
        "split",
        "the second tile's sums are never sent",
        (Edit(r"^(\tmov\.b32 \t%r\d+), 128;\n(?=\tmbarrier\.init)", r"\1, 256;\n"),),
        HANGS,
        EVERY,
    ),
}
