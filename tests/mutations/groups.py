"""Mistakes of groups, whose ends a block keeps in shared memory, and of scales that a step's columns share."""

from tests.mutations.patterns import EARLY, EVERY, HANGS, TOGETHER, UNFENCED, WRONG
from tests.mutations.record import Edit, Mutation

# The branch around the copy engine, where a part of a tile ends after its group.
LAST_PART = r"^(\tadd\.s32 \t(%r\d+), %r\d+, 64;\n\tsetp\.gt\.s32 \t(%p\d+), \2, %r\d+;\n(?:.*\n){0,14}?)\t@\3 bra.*\n"
ZEROED = r"^\tbar\.sync \t7, 256;\n"

GROUPS: dict[str, Mutation] = {
    "groups not waited for": Mutation(
        "rows",
        "a warp takes for the ends of groups what was in memory",
        (Edit(r"^\tbar\.sync \t0;\n"),),
        HANGS,
        tuple(habit for habit in EVERY if habit not in ("first_ahead", "others_stop")),
    ),
    "ends of groups read while the kernel before still runs": Mutation(
        "rows",
        "the launch may begin before the kernel that counts the rows of experts has ended",
        (Edit(r"^\tgriddepcontrol\.(?:wait|launch_dependents);\n"),),
        EARLY,
        EVERY,
    ),
    "a group's last tile stored whole": Mutation(
        "rows",
        "the copy engine writes rows of the next group, which another block may have written before",
        (Edit(LAST_PART, r"\1"),),
        WRONG,
        EVERY,
    ),
    "zeros without a fence": Mutation(
        "k",
        "wgmma reads what was there before the zeros",
        (Edit(r"^\tfence\.proxy\.async.*\n(?=\tbar\.sync \t7, 256;)"),),
        UNFENCED,
        EVERY,
    ),
    "zeros fenced after the barrier": Mutation(
        "k",
        "wgmma reads what other warps have not made visible",
        (Edit(r"^(\tfence\.proxy\.async.*\n)(\tbar\.sync \t7, 256;\n)", r"\2\1"),),
        UNFENCED,
        ("first_ahead", "last_ahead", "others_stop"),
    ),
    "zeros not waited for": Mutation(
        "k",
        "a consumer multiplies numbers of another group, for which the other one is to put zeros",
        (Edit(ZEROED),),
        WRONG,
        ("first_ahead", "last_ahead", "others_stop"),
    ),
    "zeros of one consumer waited for": Mutation(
        "k",
        "a consumer multiplies numbers of another group, for which the other one is to put zeros",
        (Edit(ZEROED, "\tbar.sync \t7, 128;\n"),),
        WRONG,
        ("first_ahead", "last_ahead", "others_stop"),
    ),
    "scales of a step read before they are written": Mutation(
        "lines",
        "a warp is ahead of those that share its columns' scales",
        (Edit(TOGETHER, which=(1, 2)),),
        WRONG,
        ("prompt", "late_stores", "late_products", "last_ahead", "others_stop", "impatient"),
    ),
    "scales of a tile overwritten before they are read": Mutation(
        "lines",
        "a warp is a tile ahead of those that still read its columns' scales",
        (Edit(TOGETHER, which=(0, 1)),),
        WRONG,
        ("first_ahead", "others_stop"),
    ),
}
