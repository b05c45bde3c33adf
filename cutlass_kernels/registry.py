"""Products on Blackwell by the kernels of NVIDIA's registry, `cutlass.operators`, compiled here for the shape at hand.

    int8 × int8, uint8 × uint8          into int32; mixtures are brought to int8, and the epilogue is plain torch
    float8 of one dtype                 scales of rows and columns and the bias are fused
    MXFP8, MXFP4, NVFP4                 scales of groups are in the product; the rest of the epilogue is plain torch

A kernel reads factors along K, compactly, in units of 16 bytes; sizes that are none are filled up with zeros.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import threading
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from cutlass_kernels import cache, groups, patches, plain
from cutlass_kernels import missing as missing_dsl
from cutlass_kernels.devices import capability_of
from cutlass_kernels.layouts import columnwise, padded, rowwise, swizzled, up
from cutlass_kernels.product import FLOAT4, FLOATS, GROUPS, INTEGERS, REALS, Product, described
from cutlass_kernels.variants import longest, short

TARGETS = {(10, 0): "100a", (10, 3): "103a", (11, 0): "110a"}
_NO_INTEGERS = ("103a",)
_EPILOGUES = {  # by whether there are scales, and a bias; the registry reads the text
    (True, False): "def epilogue(accum, lhs_scale, rhs_scale):\n    D = accum * lhs_scale * rhs_scale\n    return D\n",
    (False, True): "def epilogue(accum, bias):\n    D = accum + bias\n    return D\n",
    (True, True): "def epilogue(accum, lhs_scale, rhs_scale, bias):\n"
    "    D = accum * lhs_scale * rhs_scale + bias\n    return D\n",
}


@dataclass(frozen=True)
class Case:
    """One compiled kernel: dtypes, what is fused, and the tile; sizes are symbols in it.

    `group` is how many elements along K share a scale, 0 for none; `scaled` and `biased` say what the epilogue has.
    A tile has `tile` rows and columns; `pair` says whether the blocks of two rows of tiles share each instruction."""

    lhs: torch.dtype
    rhs: torch.dtype
    out: torch.dtype
    batched: bool = False
    group: int = 0
    scaled: bool = False
    biased: bool = False
    tile: tuple[int, int] = (128, 128)
    pair: bool = False

    @property
    def cluster(self) -> tuple[int, int]:
        """Rows and columns of the blocks that compute neighbouring tiles together."""
        return (2, 1) if self.pair else (1, 1)

    @property
    def name(self) -> str:
        """One word for it, by which it is found in the cache."""
        dtypes = "_".join(map(short, (self.lhs, self.rhs, self.out)))
        fused = "_batched" * self.batched + f"_group{self.group}" * (self.group > 0) + "_scaled" * self.scaled
        sizes = (*self.tile, *self.cluster)
        return f"{dtypes}{fused}{'_biased' * self.biased}_{'x'.join(map(str, sizes))}{'_pair' * self.pair}"

    @property
    def kernel(self) -> str:
        """The registry's name for its class of kernels."""
        if self.group:
            return "PersistentDenseBlockScaledGemmOperator"
        fused = self.scaled or self.biased
        return "PersistentDenseGemmEFCOperator" if fused else "PersistentDenseGemmOperator"


@dataclass(frozen=True)
class Call:
    """The arguments of a kernel, and the product that remains to finish afterwards, or None."""

    case: Case
    lhs: Tensor
    rhs: Tensor
    out: Tensor
    vectors: tuple[Tensor, ...]
    rest: Product | None


@dataclass(frozen=True)
class Registered:
    """A compiled kernel: its case, its target as sm_100a, and the multiprocessors, whose number some kernels hold."""

    case: Case
    target: str
    multiprocessors: int

    @property
    def name(self) -> str:
        return f"registry_{self.case.name}_{self.multiprocessors}"


# ---- what it takes


@functools.cache
def missing() -> str | None:
    """Why the registry cannot be used here, or None; imports nothing."""
    if (reason := missing_dsl()) is not None:
        return reason
    try:  # not find_spec, which imports the package around a module
        importlib.metadata.version("nvidia-cutlass-operators")
    except importlib.metadata.PackageNotFoundError:
        return "NVIDIA's registry of kernels is not installed: pip install nvidia-cutlass-operators"
    return None


def declines(product: Product, capability: tuple[int, int]) -> str | None:
    """Why this route does not take the product, or None."""
    p, target = product, TARGETS.get(capability)
    if target is None:
        return f"the registry's kernels are for GPUs of capability {sorted(TARGETS)}, got {capability}"
    if (reason := missing()) is not None:
        return reason
    if p.lhs.device.type != "cuda":
        return f"the registry's kernels run on CUDA devices, got {p.lhs.device}"
    if groups.is_stack(p):
        return "the registry's kernels for groups, and for batches with vectors of their own, are not asked"
    if p.is_integer:
        if target in _NO_INTEGERS:
            return f"sm_{target} has no products of 8-bit integers"
        dtypes = (p.lhs.dtype, p.rhs.dtype) if p.lhs.dtype == p.rhs.dtype else (torch.int8, torch.int8)
        if p.k > (most := longest(*dtypes)):
            return f"K must be at most {most}, up to which sums fit int32, got {p.k}"
        return None
    kind = p.scaling
    if kind in ("block", "1x128"):
        return "the registry has no kernel with float32 scales of blocks"
    if kind != "group" and p.lhs.dtype != p.rhs.dtype:
        return (
            f"the registry multiplies float8 of one dtype without scales of groups, got {p.lhs.dtype} and {p.rhs.dtype}"
        )
    return None


def run(product: Product) -> Tensor:
    """The product, ([B,] M, N)."""
    if 0 in (*product.lhs.shape, product.n):
        return plain.of_nothing(product)
    device = product.lhs.device
    with torch.cuda.device(device):
        count = torch.cuda.get_device_properties(device).multi_processor_count
        call = prepared(product, count)
        kernel = Registered(call.case, _target(device), count)
        launch(compiled(kernel), call, torch.cuda.current_stream(device).cuda_stream)
        return finished(product, call)


def kernel_of(product: Product, multiprocessors: int, target: str) -> Registered:
    """The kernel for a product, from its dtypes, shapes and strides."""
    with _disable_current_modes():
        return Registered(prepared(described(product), multiprocessors).case, target, multiprocessors)


def chosen(product: Product) -> Registered:
    """The kernel for a product on its GPU."""
    device = product.lhs.device
    return kernel_of(product, torch.cuda.get_device_properties(device).multi_processor_count, _target(device))


def compiled(kernel: Registered) -> Any:
    case, target, count = kernel.case, kernel.target.removeprefix("sm_"), kernel.multiprocessors
    return cache.kernel(kernel.name, kernel.target, lambda: compile_for(target, case, count))


def _target(device: torch.device) -> str:
    return f"sm_{TARGETS[capability_of(device)]}"


def finished(p: Product, call: Call) -> Tensor:
    """The result from what a kernel wrote."""
    total = call.out[..., : p.m, : p.n]
    if p.is_integer:
        if p.lhs.dtype != p.rhs.dtype:
            total = plain.from_signed(p, call.lhs, total)
        total = plain.corrected(p, total)
    return total if call.rest is None else plain.finish(call.rest, total)


# ---- from a product to a call


def prepared(p: Product, multiprocessors: int) -> Call:
    """The call for a product: factors in the layout that kernels read, and an empty result."""
    if p.is_integer:
        lhs, rhs = _same_integers(p)
        return _call(p, Case(lhs.dtype, rhs.dtype, torch.int32), lhs, rhs, multiprocessors, p)
    kind = p.scaling
    scaled = kind == "vector"
    biased = p.bias is not None and kind != "group" and p.global_scale is None
    left = replace(p, lhs_scale=None, rhs_scale=None, bias=None if biased else p.bias)
    # What is too large for float8 becomes what PyTorch's cast makes of it, and not what a kernel's own does.
    rest = left if p.global_scale is not None or left.bias is not None or p.out not in REALS else None
    out = p.out if rest is None else torch.float32
    group = GROUPS[p.lhs_scale.dtype] if p.lhs_scale is not None and kind == "group" else 0
    case = Case(p.lhs.dtype, p.rhs.dtype, out, group=group, scaled=scaled, biased=biased)
    return _call(p, case, p.lhs, p.rhs, multiprocessors, rest)


def _same_integers(p: Product) -> tuple[Tensor, Tensor]:
    """The factors, in one dtype."""
    return (p.lhs, p.rhs) if p.lhs.dtype == p.rhs.dtype else (plain.signed(p.lhs), plain.signed(p.rhs))


def _call(p: Product, case: Case, lhs: Tensor, rhs: Tensor, multiprocessors: int, rest: Product | None) -> Call:
    # Results and vectors are read and written, and factors read, in units of 16 bytes.
    m, n, k = up(p.m, 4) if case.scaled else p.m, up(p.n, 8), up(p.k, 32 if case.group and lhs.dtype != FLOAT4 else 16)
    lhs, rhs = rowwise(padded(lhs, m, k)), columnwise(padded(rhs, k, n))
    out = torch.empty((*lhs.shape[:-1], n), dtype=case.out, device=lhs.device)
    vectors: tuple[Tensor, ...] = ()
    if case.group:
        assert p.lhs_scale is not None and p.rhs_scale is not None
        blocks = k * (2 if lhs.dtype == FLOAT4 else 1) // case.group
        vectors = tuple(
            swizzled(padded(s, s.shape[0], blocks)) for s in (p.lhs_scale, padded(p.rhs_scale, blocks, n).mT)
        )
    elif case.scaled:
        vectors = (_filled(p.lhs_scale, p.m, m).reshape(1, m).mT, _filled(p.rhs_scale, p.n, n).reshape(1, n))
    if case.biased:
        vectors = (*vectors, _filled(p.bias, p.n, n))
    case = tiled(replace(case, batched=lhs.dim() == 3), m, n, multiprocessors)
    return Call(case, lhs, rhs, out, vectors, rest)


def _filled(vector: Tensor | None, size: int, length: int) -> Tensor:
    """(length,) float32: the vector, or its one element `size` times, and zeros."""
    assert vector is not None
    found = torch.zeros(length, dtype=torch.float32, device=vector.device)
    found[:size] = vector.reshape(-1)
    return found


def tiled(case: Case, m: int, n: int, multiprocessors: int) -> Case:
    """The case with the largest tile of which there is one for each multiprocessor, or else a small one."""
    if case.group:  # these kernels come in clusters of two
        is_large = -(-m // 256) * -(-n // 128) * 2 >= multiprocessors
        return replace(case, tile=(256, 128) if is_large else (128, 64), pair=True)
    if -(-m // 256) * -(-n // 256) * 2 >= multiprocessors:
        return replace(case, tile=(256, 256), pair=True)
    return replace(case, tile=(64, 64) if m <= 64 else (128, 128))


# ---- compilation and launch


_LOCK = threading.RLock()


def _operators() -> Any:
    """The registry, whose package has no types; it takes some seconds to import."""
    return importlib.import_module("cutlass.operators")


def compile_for(target: str, case: Case, multiprocessors: int) -> Any:
    """The kernel of a case for a target such as "100a", and a GPU of so many multiprocessors; needs no GPU."""
    from torch._subclasses import FakeTensorMode

    with _LOCK, patches.multiprocessors(multiprocessors), patches.moved_schedulers(), patches.superseded_divisors():
        with FakeTensorMode():
            args = arguments(case, *_examples(case))
        found = _operators().get_operators(args, lambda metadata: _is_chosen(case, metadata), target)
        if not found:
            raise RuntimeError(
                f"cutlass.operators has no kernel {case.kernel} for sm_{target} and {case}: use another route"
            )
        return found[0].compile(args, target_sm=target).compiled_obj


def _examples(case: Case) -> tuple[Tensor, ...]:
    """lhs, rhs, out and vectors of some shape."""
    size, lead = 512, (2,) if case.batched else ()
    packing = 2 if case.lhs == FLOAT4 else 1
    lhs = torch.empty((*lead, size, size // packing), dtype=case.lhs)
    rhs = torch.empty((*lead, size, size // packing), dtype=case.rhs).mT
    vectors: list[Tensor] = []
    if case.group:
        dtype = next(dtype for dtype, group in GROUPS.items() if group == case.group)
        vectors = [torch.empty(size * size // case.group, dtype=dtype) for _ in range(2)]
    if case.scaled:
        vectors = [torch.empty(1, size).mT, torch.empty(1, size)]
    if case.biased:
        vectors.append(torch.empty(size))
    return lhs, rhs, torch.empty((*lead, size, size), dtype=case.out), *vectors


def arguments(case: Case, lhs: Tensor, rhs: Tensor, out: Tensor, *vectors: Tensor) -> Any:
    """The registry's names for the arguments of a product."""
    operators = _operators()
    total = torch.int32 if case.lhs in INTEGERS else torch.float32
    if case.group:
        mode = {32: operators.ScaleMode.Blockwise1x32, 16: operators.ScaleMode.Blockwise1x16}[case.group]
        swizzle = operators.ScaleSwizzleMode.Swizzle32x4x4
        factors = [
            operators.ScaledOperand(t, scale, mode, swizzle) for t, scale in zip((lhs, rhs), vectors, strict=True)
        ]
        return operators.GemmArguments(*factors, out, accumulator_type=total)
    epilogue = None
    if case.scaled or case.biased:
        names = ("lhs_scale", "rhs_scale") * case.scaled + ("bias",) * case.biased
        given = dict(zip(names, vectors, strict=True))
        epilogue = operators.EpilogueArguments(_EPILOGUES[case.scaled, case.biased], D=out, **given)
    return operators.GemmArguments(lhs, rhs, out, accumulator_type=total, epilogue=epilogue)


def _is_chosen(case: Case, metadata: Any) -> bool:
    """Whether an entry of the registry is the kernel of the case."""
    design = metadata.design
    # Tiles that blocks ask for while they run leave none idle, and need no count of multiprocessors.
    scheduler = type(getattr(design, "tile_scheduler", None)).__name__
    return (
        metadata.operator_class.__name__ == case.kernel
        and tuple(design.tile_shape[:2]) == case.tile
        and tuple(design.cluster_shape[:2]) == case.cluster
        and design.use_2cta_mma == case.pair
        and (case.kernel != "PersistentDenseGemmOperator" or scheduler.startswith("CLC"))
    )


def launch(kernel: Any, call: Call, stream: int) -> None:
    """Run a compiled kernel. The registry's own `run` takes 0.3 to 2 ms to describe its arguments; this none."""
    import cuda.bindings.driver as cuda

    handle = cuda.CUstream(stream)
    if not call.case.group:
        fused = call.case.scaled or call.case.biased
        kernel(call.lhs, call.rhs, *((handle, *call.vectors, call.out) if fused else (call.out, handle)))
        return
    import cutlass
    from cutlass.cute import runtime

    dtypes = {FLOAT4: cutlass.Float4E2M1FN, torch.float8_e8m0fnu: cutlass.Float8E8M0FNU, torch.float32: cutlass.Float32}
    dtypes |= {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}
    dtypes |= dict(zip(FLOATS, (cutlass.Float8E4M3FN, cutlass.Float8E5M2), strict=True))

    def pointer(t: Tensor, alignment: int) -> Any:
        return runtime.make_ptr(dtypes[t.dtype], t.data_ptr(), cutlass.AddressSpace.gmem, alignment)

    factors, scales = [pointer(t, 16) for t in (call.lhs, call.rhs)], [pointer(t, 32) for t in call.vectors]
    k = call.lhs.shape[1] * (2 if call.lhs.dtype == FLOAT4 else 1)
    kernel(*factors, *scales, pointer(call.out, 16), (*call.out.shape, k, 1), handle)
