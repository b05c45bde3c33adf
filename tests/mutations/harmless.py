"""Synchronizations that a kernel can do without; `fault` says why."""

from tests.mutations.patterns import TOGETHER, WAIT
from tests.mutations.record import Edit, Mutation

HARMLESS: dict[str, Mutation] = {
    "no barrier before columns' values that the copy engine stores": Mutation("cooperative",
        "all warps have read them before the barrier that goes before the store of a tile's last part",
        (Edit(TOGETHER, which=(0, 1)),)),
    "no barrier after columns' values that the copy engine stores": Mutation("cooperative",
        "the barrier before the first part of the results comes before they are read", (Edit(TOGETHER, which=(1, 2)),)),
    "producer does not wait at the end": Mutation("cooperative",
        "nobody but the block itself signals its mbarriers, and its consumers wait for all loads",
        (Edit(WAIT, part="producer", which=(-2, None)),)),
    "no wgmma.fence between steps": Mutation("cooperative",
        "products of one shape that follow each other in the same accumulators are ordered",
        (Edit(r"^\twgmma\.fence.*\n", which=(1, None)),)),
    "tensor maps not fetched ahead": Mutation("cooperative", "a prefetch is a hint",
        (Edit(r"^\tprefetch\.tensormap.*\n"),)),
    "turn handed over though no tile follows": Mutation("pingpong",
        "the other consumer has ended, and nobody waits at that barrier again",
        (Edit(r"^\t@%p\d+ bra \t\$L\S+;\n(?=\t// begin inline asm\n\tbar\.arrive %r)"),)),
}  # fmt: skip
