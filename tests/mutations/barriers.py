"""Mistakes in the setting up of barriers, and in how registers are shared out."""

from tests.mutations.patterns import (
    AGAIN,
    BRANCH,
    DIFFER,
    EVERY,
    HANGS,
    MISCOUNTED,
    STEPS,
    UNINITIALIZED,
    UNPUBLISHED,
    WRONG,
)
from tests.mutations.record import Edit, Mutation

BARRIERS: dict[str, Mutation] = {
    "barriers not published": Mutation(
        "cooperative",
        "the copy engine completes bytes on an mbarrier whose initialization it does not see",
        (Edit(r"^\tfence\.mbarrier_init.*\n"),),
        UNPUBLISHED,
        EVERY,
    ),
    "barriers not published to the cluster": Mutation(
        "cluster",
        "another block arrives at an mbarrier whose initialization it does not see",
        (Edit(r"^\tfence\.mbarrier_init.*\n"),),
        UNPUBLISHED,
        EVERY,
    ),
    "no barrier after the initialization": Mutation(
        "cooperative",
        "a warp waits for an mbarrier that is still what was in memory",
        (Edit(r"^\tbar\.sync \t0;\n"),),
        UNINITIALIZED,
        ("last_ahead",),
    ),
    "a barrier of the block for one of the cluster": Mutation(
        "cluster",
        "a block signals another one that has not initialized its mbarriers",
        (Edit(r"^\tbarrier\.cluster\.arrive.*\n"), Edit(r"^\tbarrier\.cluster\.wait.*\n", "\tbar.sync \t0;\n")),
        UNINITIALIZED,
        ("first_ahead", "last_ahead"),
    ),
    "barriers initialized by all lanes": Mutation(
        "cooperative",
        "an mbarrier is initialized again while others already arrive",
        (Edit(BRANCH + r"(?=\tmov\.b32.*\n\tmbarrier\.init)"),),
        AGAIN,
        EVERY,
    ),
    "full after two arrivals": Mutation(
        "cooperative",
        "a phase of a full barrier never ends, since the producer arrives once",
        (Edit(r"^(\tmov\.b32 \t%r\d+), 1;\n(?=\tmbarrier\.init)", r"\1, 2;\n"),),
        HANGS,
        EVERY,
    ),
    "empty after one consumer": Mutation(
        "cooperative",
        "a stage is loaded again while the second consumer multiplies it",
        (Edit(r"^(\tmov\.b32 \t%r\d+), 8;\n(?=\tmbarrier\.init)", r"\1, 4;\n"),),
        "|".join((HANGS, WRONG, MISCOUNTED)),
        ("late_loads", "reordered_loads", "late_products", "first_ahead", "last_ahead"),
    ),
    "empty after twice the arrivals": Mutation(
        "cooperative",
        "a phase of an empty barrier never ends",
        (Edit(r"^(\tmov\.b32 \t%r\d+), 8;\n(?=\tmbarrier\.init)", r"\1, 16;\n"),),
        HANGS,
        EVERY,
    ),
    "producer keeps its registers": Mutation(
        "cooperative",
        "the consumers wait for registers that nobody gives up",
        (Edit(r"^(\tsetmaxnreg\.dec\S+ \t)24", r"\g<1>168"),),
        HANGS,
        EVERY,
    ),
    "consumers ask for too many registers": Mutation(
        "cooperative",
        "the second consumer waits for registers that the block does not have",
        (Edit(r"^(\tsetmaxnreg\.inc\S+ \t)240", r"\g<1>248"),),
        HANGS,
        EVERY,
    ),
    "one warp of four gives up registers": Mutation(
        "cooperative",
        "the idle warps of the producer end with registers that the consumers wait for",
        (Edit(r"^(\tsetmaxnreg\.dec.*\n)(\t@%p\d+ bra.*\n)", r"\2\1"),),
        HANGS,
        EVERY,
    ),
    "one warp of four changes its registers": Mutation(
        "swapped",
        "setmaxnreg is undefined where a warpgroup's warps differ in it",
        (Edit(r"^(\tsetmaxnreg\.dec.*\n)(\t@%p\d+ bra.*\n)", r"\2\1"),),
        DIFFER,
        EVERY,
    ),
    "registers in steps of four": Mutation(
        "cooperative",
        "setmaxnreg takes multiples of eight",
        (Edit(r"^(\tsetmaxnreg\.inc\S+ \t)240", r"\g<1>228"),),
        STEPS,
        EVERY,
    ),
}
