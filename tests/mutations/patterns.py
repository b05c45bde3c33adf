"""How the CuTe DSL writes what mutations change, and what the emulator says of them, as regular expressions."""

from tests.ptx import HABITS

EVERY = tuple(HABITS)

# How the CuTe DSL writes them.
WAIT = r"^\tmbarrier\.try_wait.*\n\t@P1 bra\.uni DONE; *\n\tbra\.uni +LAB_WAIT; *\n"
PARITY = r"^\t(mbarrier\.try_wait\S+ P1, \[%r\d+\]), (%r\d+),"
FLIP = r"^(\tselp\.b32 \t(%r\d+), 1, 0, %p\d+;\n)\txor\.b32 (\t%r\d+, %r\d+), \2;"
ANNOUNCE = r"^(\tmov\.b32 \t%r\d+), \d+;\n(?=\tmbarrier\.arrive\.expect_tx)"
LOAD = r"^(\tcp\.async\.bulk\.tensor\S+mbarrier\S+ \[%r\d+\+\d+\], \[%rd\d+, \{[^}]*\}\]), \[(%r\d+)\]"
BRANCH = r"^\t@%p\d+ bra \t\$L\S+;\n"
RELEASE = r"^\tmbarrier\.arrive\.shared\.b64 %rd\d+, \[(%r\d+)\+16\], %r\d+;\n"
DRAIN = r"^\tcp\.async\.bulk\.wait_group\.read \t1;\n"
TOGETHER = r"^\tbar\.sync \t(%r\d+), 128;\n"

# What the emulator says.
HANGS = "nobody can run"
MISCOUNTED = "arrivals at an mbarrier"
UNPUBLISHED = "without fence.mbarrier_init"
UNINITIALIZED = "no mbarrier is initialized"
AGAIN = "initialized again"
DIFFER = "differ in setmaxnreg"
STEPS = "in steps of 8"
UNREAD = "ends before this is done with its shared memory"
ENDED = "which has ended, is used"
UNORDERED = "or never ordered, since the last wgmma.fence"
UNDER_WAY = "wgmma that is not waited for"
UNFENCED = "without fence.proxy.async"
SIZES = "others expect"
EARLY = "before griddepcontrol.wait"
OVERFLOWS = "an mbarrier waits for -"
WRONG = "wrong results"  # Kernel.outcome
