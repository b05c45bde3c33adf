"""The kernel of an optimizer step, as values; nothing here needs the CuTe DSL or a GPU.

A step takes each parameter p, its gradient g and its states through one pass over memory, each operation in float32
rounded by itself:

    adam   m = β₁ m + r₁ g,  v = β₂ v + r₂ g²,  [x = max(x, v)],  p = d p - rate (m / (√v or √x · scale + ε))
    sgd    b = μ b + r g, in the first step g;  p = p - rate (b, nesterov: g + μ b, or g without a state)
    lion   p = d p - rate sign(β₁ m + r₁ g),    m = β₂ m + r₂ g

coupled: g + λ p takes the place of g. A state in codes has a scale for each block, found from its largest magnitude.
"""

import hashlib
from dataclasses import dataclass

import torch

from cutlass_kernels.books import Layout
from cutlass_kernels.variants import TARGET, short

NUMBERS = {
    "adam": ("decay", "weight", "beta1", "rest1", "beta2", "rest2", "rate", "scale", "eps"),
    "sgd": ("weight", "momentum", "rest", "rate", "first"),
    "lion": ("decay", "beta1", "rest1", "beta2", "rest2", "rate"),
}
"""The numbers of a step, in order."""

REALS = (torch.float32, torch.bfloat16, torch.float16)
LANE, WARP = 8, 32  # elements of a thread at a time, threads of a warp
WARPS = 20  # of a block: as many as leave each thread the registers that it takes
PIECE = LANE * WARP  # elements of a warp at a time
UNIT = 4 * PIECE  # that a warp takes before it asks for others
# The words of a parameter's record: where its units begin among all, how many elements it has, its kind, whether all of
# its memory lies in steps of 16 bytes, its stream of random numbers; from P on the addresses of itself, its gradient,
# and of codes and scales of its states. One more record has the count of all units.
FIRST, COUNT, KIND, WHOLE, STREAM, P = range(6)
RECORD = 16
LEAST_BLOCK, MOST_BLOCK = 16, PIECE
_STATES = {"adam": (2, 3), "sgd": (0, 1), "lion": (1, 1)}
TARGETS = {
    (8, 0): "sm_80", (8, 6): "sm_86", (8, 9): "sm_89", (9, 0): TARGET, (10, 0): "sm_100a", (10, 3): "sm_103a",
    (11, 0): "sm_110a", (12, 0): "sm_120a", (12, 1): "sm_121a",
}  # fmt: skip
"""By compute capability, the GPUs that kernels are compiled for."""
SHARED = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_120a": 99, "sm_121a": 99}
"""KiB of shared memory that a block may have; of others LARGEST_SHARED."""
LARGEST_SHARED = 227
WITHOUT_FLOAT8 = ("sm_80", "sm_86")


@dataclass(frozen=True)
class Codes:
    """How a state in codes is encoded.

    Args:
        format: float8_e4m3fn, or the layout of a codebook.
        block: consecutive elements with one scale, a power of two.
        book: which of the kernel's codebooks.
        raised: whether a number above 0 has the code of the least number above 0 at least.
    """

    format: torch.dtype | Layout
    block: int
    book: int = 0
    raised: bool = False

    @property
    def bits(self) -> int:
        return self.format.bits if isinstance(self.format, Layout) else 8

    @property
    def name(self) -> str:
        kind = f"{self.format.name}-{self.book}" if isinstance(self.format, Layout) else short(self.format)
        return f"{kind}-{self.block}{'-raised' * self.raised}"

    def declines(self) -> str | None:
        """Why no kernel has such a state, or None."""
        if not LEAST_BLOCK <= self.block <= MOST_BLOCK or self.block & (self.block - 1):
            return f"blocks of {LEAST_BLOCK} to {MOST_BLOCK} elements, a power of two, not of {self.block}"
        if not isinstance(self.format, Layout) and self.format != torch.float8_e4m3fn:
            return f"states in codebooks or float8_e4m3fn, not in {self.format}"
        return None


State = Codes | torch.dtype  # a dtype is one of floats


@dataclass(frozen=True)
class Kind:
    """Common properties of parameters: their dtype, their gradients' dtype, and the formats of their states."""

    p: torch.dtype
    grad: torch.dtype
    states: tuple[State, ...] = ()

    @property
    def name(self) -> str:
        states = [s.name if isinstance(s, Codes) else short(s) for s in self.states]
        return "_".join([short(self.p), short(self.grad), *states])

    @property
    def codes(self) -> tuple[Codes, ...]:
        """The states in codes."""
        return tuple(s for s in self.states if isinstance(s, Codes))

    def declines(self) -> str | None:
        """Why no kernel has such parameters, or None."""
        for dtype in (self.p, self.grad, *(s for s in self.states if not isinstance(s, Codes))):
            if dtype not in REALS:
                return f"float32, bfloat16 and float16, not {dtype}"
        return next((why for s in self.states if isinstance(s, Codes) and (why := s.declines())), None)


@dataclass(frozen=True)
class Update:
    """One kernel: a rule, the kinds of parameters that it takes in one launch, and the codebooks of their states.

    Args:
        rule: "adam", "sgd" or "lion".
        kinds: all that parameters may be.
        books: the layouts of the codebooks.
        coupled, nesterov, maximize, stochastic: of all parameters; stochastic for those in bfloat16.
        target: the GPU that it is compiled for.
    """

    rule: str
    kinds: tuple[Kind, ...]
    books: tuple[Layout, ...] = ()
    coupled: bool = False
    nesterov: bool = False
    maximize: bool = False
    stochastic: bool = False
    target: str = TARGET

    @property
    def name(self) -> str:
        """One word for it, by which it is found in the cache."""
        flags = [f for f in ("coupled", "nesterov", "maximize", "stochastic") if getattr(self, f)]
        full = "__".join(["_".join(["step", self.rule, *flags]), *(k.name for k in self.kinds), f"x{self.copies}"])
        return full if len(full) <= 150 else f"{full[:130]}_{hashlib.sha256(full.encode()).hexdigest()[:16]}"

    @property
    def copies(self) -> int:
        """Of each table of 256 numbers in shared memory: one for each thread of a warp, so that none waits for
        another, or as many as there is room for."""
        return next((c for c in (WARP, 8) if self._bytes(c) <= self._room), 1)

    @property
    def shared_bytes(self) -> int:
        return self._bytes(self.copies)

    @property
    def _room(self) -> int:
        return SHARED.get(self.target, LARGEST_SHARED) * 1024

    def _bytes(self, copies: int) -> int:
        return sum(4 * (2 * b.size + 1) * (copies if b.bits == 8 else 1) + b.index_bytes for b in self.books)

    def declines(self) -> str | None:
        """Why no kernel can be made so, or None."""
        least, most = _STATES[self.rule]
        for kind in self.kinds:
            if not least <= len(kind.states) <= most:
                return f"{self.rule} with {least} to {most} states, not {len(kind.states)}"
            if (why := kind.declines()) is not None:
                return why
            if self.target in WITHOUT_FLOAT8 and any(s.format == torch.float8_e4m3fn for s in kind.codes):
                return f"states in float8_e4m3fn from compute capability 8.9 on, and this is for {self.target}"
        if self._bytes(1) > self._room:
            return f"codebooks that fit into {self._room} bytes of shared memory, not {len(self.books)}"
        return None
