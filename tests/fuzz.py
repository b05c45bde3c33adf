"""Random calls of public functions whose operands were changed behind their backs, in this process: one line for each
that breaks the rule

    a call raises an error that names what is wrong, or gives what PyTorch's own operators give of the same tensors.

    python -m tests.fuzz --first 0 --count 1000 [--report FILE]

A call and its changes follow from its seed alone. It is made twice, of tensors that are made anew: by the native
kernels, and without them. Half of the tensors end where a page begins that must not be touched, so that what is read
beyond them ends the process; FILE then says by which seed.
"""

import argparse
import contextlib
import ctypes
import math
import mmap
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hop
from hop import QuantizedTensor, Quantizer
from hop import presets as P
from hop.compat import memory
from hop.kernels.cpu import native
from hop.numerics.formats import INT8, UINT8
from hop.numerics.scale_rules import MinMax, Static

aten = torch.ops.aten

SANE = (TypeError, ValueError, RuntimeError, IndexError, AttributeError, FloatingPointError, MemoryError)
SANE = (*SANE, ZeroDivisionError)  # of torch.optim's Adam too, where a count of steps was set to -1

Rng = random.Random


def faults(module: str, first: int, count: int, each: int = 1000) -> list[str]:
    """What `python -m module` says of so many seeds from `first`, some in each process; where a signal ends one, at
    which seed."""
    found: list[str] = []
    print(f"seeds {first} to {first + count - 1} of {module}")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "seed"
        for at in range(first, first + count, each):
            end = min(at + each, first + count)
            while at < end:
                command = [sys.executable, "-m", module, "--first", str(at), "--count", str(end - at)]
                done = subprocess.run(
                    [*command, "--report", str(report)],
                    cwd=Path(__file__).parents[1],
                    capture_output=True,
                    text=True,
                    timeout=each,
                    check=False,
                )
                found += [line for line in done.stdout.splitlines() if line.startswith("seed ")]
                if done.returncode == 0:
                    break
                at = int(report.read_text()) + 1
                found.append(f"seed {at - 1}: status {done.returncode}\n{done.stderr[-2000:]}")
    return found


# ---- tensors before a page that must not be touched

_PAGE = mmap.PAGESIZE
_regions: list[Any] = []  # of the call that is made now


def guarded(x: Tensor) -> Tensor:
    """A copy of a contiguous tensor that ends where such a page begins."""
    size = x.numel() * x.itemsize
    if size == 0:
        return x.clone()
    pages = -(-size // _PAGE)
    region = mmap.mmap(-1, (pages + 1) * _PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(region))
    start = pages * _PAGE - size
    made = torch.frombuffer(region, dtype=torch.uint8, count=size, offset=start).view(x.dtype).view(x.shape)
    made.copy_(x)
    _protect(base + pages * _PAGE, 0)
    _regions.append((region, base + pages * _PAGE))
    return made


def _protect(address: int, rights: int) -> None:
    function = ctypes.CDLL(None, use_errno=True).mprotect
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if function(address, _PAGE, rights):
        raise OSError(ctypes.get_errno(), "mprotect")


def forget() -> None:
    """Let the regions go once their tensors are gone."""
    for _, page in _regions:
        _protect(page, mmap.PROT_READ | mmap.PROT_WRITE)
    _regions.clear()


# ---- what is made

QUANTIZERS = [
    *(P.INT8_TENSOR, P.INT8_ROW, P.INT8_ROW_AFFINE, P.INT8_TENSOR_AFFINE, P.UINT8_ROW_AFFINE, P.INT4_32),
    *(P.UINT4_32_AFFINE, P.FP8_ROW, P.FP8_TENSOR, P.MXFP8, P.NVFP4, P.NVFP4_ROW, P.STATE8, P.STATE4, P.FP8_128X128),
    Quantizer(INT8, (1, 32)),
]
EXACT = [P.INT8_TENSOR, P.INT8_ROW, P.INT8_ROW_AFFINE, P.INT8_TENSOR_AFFINE, P.UINT8_ROW_AFFINE]
WEIGHTS = [P.INT8_TENSOR, P.INT8_ROW, P.INT4_32, Quantizer(INT8, (1, 32))]
STATIC = [Quantizer(INT8, scale=Static()), Quantizer(UINT8, scale=Static(affine=True))]


def plain(rng: Rng, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rng.getrandbits(32))).to(dtype)
    return guarded(x) if rng.random() < 0.5 else x


def quantized(rng: Rng, q: Quantizer, *shape: int) -> QuantizedTensor:
    t = hop.quantize(q, plain(rng, *shape))
    if rng.random() < 0.5:
        for name, buffer in t.buffers().items():
            setattr(t, name, guarded(buffer.contiguous()))
    return t


# ---- what is done to tensors


def _sizes(rng: Rng, x: Tensor) -> list[int]:
    """A shape near that of x."""
    shape = list(x.shape) or [1]
    at = rng.randrange(len(shape))
    shape[at] = rng.choice([0, 1, shape[at] // 2, shape[at] - 1, shape[at] + 1, shape[at] * 2])
    return rng.choice([shape, shape[::-1], [*shape, 1], [math.prod(shape)], shape[1:]])


def _resize(rng: Rng, x: Tensor) -> None:
    before = x.untyped_storage().nbytes()
    x.resize_([max(n, 0) for n in _sizes(rng, x)])
    if x.untyped_storage().nbytes() > before:
        x.untyped_storage().fill_(1)  # not whatever the memory held


def _set(rng: Rng, x: Tensor) -> None:
    other = torch.ones([max(n, 0) for n in _sizes(rng, x)], dtype=x.dtype)
    x.set_(other if rng.random() < 0.7 or not memory.holds(x) else x.clone())


def _shrink(rng: Rng, x: Tensor) -> None:
    storage = x.untyped_storage()
    size = storage.nbytes()
    storage.resize_(min(size, rng.choice([0, 1, size // 2, max(size - 1, 0)])))


def _grow(rng: Rng, x: Tensor) -> None:
    x.untyped_storage().resize_(x.untyped_storage().nbytes() * 2 + 1)
    x.untyped_storage().fill_(1)


def _data(rng: Rng, x: Tensor) -> None:
    shorter = torch.ones([max(n, 0) for n in _sizes(rng, x)], dtype=x.dtype)
    x.data = rng.choice([x.to(torch.float64), x.to(torch.int32), shorter, x.clone().mT if x.dim() > 1 else x[:1]])


def _turn(rng: Rng, x: Tensor) -> None:
    rng.choice([lambda: x.t_(), lambda: x.unsqueeze_(0), lambda: x.squeeze_(), lambda: x.transpose_(0, -1)])()


def _strided(rng: Rng, x: Tensor) -> None:
    strides = [rng.choice([0, 1, s, 2 * s, 2**40]) for s in x.stride()]
    x.as_strided_(x.shape, strides, rng.choice([0, 0, 1, 7]))


def _values(rng: Rng, x: Tensor) -> None:
    extreme = [math.inf, -math.inf, math.nan, 1e38, 1e-40] if x.dtype.itemsize > 1 else []
    with torch.no_grad():
        x.fill_(rng.choice([0, 1, -1, 127, *extreme]))


def _swap(rng: Rng, x: Tensor) -> None:
    others = [
        torch.empty(x.shape, dtype=x.dtype, device="meta"),
        torch.ones([max(n, 0) for n in _sizes(rng, x)], dtype=x.dtype),
        torch.zeros(x.shape, dtype=torch.int16),
    ]
    torch.utils.swap_tensors(x, rng.choice(others))


IN_PLACE: list[Callable[[Rng, Tensor], None]] = [
    *(_resize, _resize, _set, _shrink, _shrink, _grow, _data, _turn, _strided, _values, _swap)
]


def _assigned(rng: Rng, t: QuantizedTensor) -> None:
    name = rng.choice(list(t.buffers()))
    x = getattr(t, name)
    if not memory.holds(x):
        return
    others: list[Callable[[], Any]] = [
        lambda: x[..., :1],
        lambda: x.to(torch.float64),
        lambda: x.view(torch.uint8),
        lambda: torch.empty_like(x, device="meta"),
        lambda: torch.ones((), dtype=x.dtype).expand(x.shape),
        lambda: torch.ones((*x.shape[:-1], 3 * x.shape[-1]), dtype=x.dtype)[..., ::3],
        lambda: x.clone().mT.contiguous().mT,
        lambda: x.to_sparse(),
        lambda: None,
        lambda: 7.4,
        lambda: x.new_ones([2 * n for n in x.shape]),
        lambda: torch.nn.Parameter(x.clone(), requires_grad=False),
    ]
    setattr(t, name, rng.choice(others)())


def _exchanged(rng: Rng, t: QuantizedTensor) -> None:
    a, b = rng.choice(list(t.buffers())), rng.choice(list(t.buffers()))
    x, y = getattr(t, a), getattr(t, b)
    if rng.random() < 0.5:
        setattr(t, a, y)
        setattr(t, b, x)
    else:
        torch.utils.swap_tensors(x, y)


def _requantized(rng: Rng, t: QuantizedTensor) -> None:
    t.quantizer = rng.choice(QUANTIZERS)


def change(rng: Rng, tensors: list[Any]) -> None:
    """Change one of the tensors, or a buffer of it; what PyTorch or the tensor refuses changes nothing."""
    t = rng.choice(tensors)
    with contextlib.suppress(*SANE):
        if isinstance(t, QuantizedTensor):
            if rng.random() < 0.3:
                rng.choice([_assigned, _assigned, _exchanged, _requantized])(rng, t)
                return
            t = rng.choice(list(t.buffers().values()))
        which = rng.choice(IN_PLACE)
        if memory.holds(t) or which in (_resize, _set, _shrink):  # the others read it, which PyTorch does not survive
            which(rng, t)


def fill_up(t: Any) -> None:
    """Let tiles be filled up with zeros again, as their layout has it; kernels read what fills them up."""
    with contextlib.suppress(*SANE):
        if isinstance(t, QuantizedTensor) and t.quantizer.is_tiled():
            t.codes = hop.pack(hop.unpack(t), t.quantizer.layout).codes


# ---- what is called: each gives the tensors that are changed, and the call

Case = tuple[list[Any], Callable[[], Any]]


def matmul(rng: Rng) -> Case:
    m, n, k = rng.choice([1, 2, 5, 33]), rng.choice([1, 16, 40]), rng.choice([32, 64, 160])
    x, w = quantized(rng, rng.choice(EXACT), m, k), quantized(rng, rng.choice(WEIGHTS), n, k)
    if rng.random() < 0.3:
        w = hop.pack(w)
    args: list[Any] = [x, w]
    if rng.random() < 0.4:
        args.append(plain(rng, n))
    given: dict[str, Any] = {}
    output: Any = rng.choice([torch.float32, torch.float32, torch.bfloat16])
    if rng.random() < 0.3:
        output = rng.choice(STATIC)
        given["output_scale"] = torch.full((1, 1) if rng.random() < 0.5 else (), 0.25)
        if output.scale.has_zero_point():
            given["output_zero_point"] = torch.full((1, 1), 7, dtype=torch.uint8)
    return [*args, *given.values()], lambda: hop.scaled(aten.linear.default, output, *args, **given)


def transposed(rng: Rng) -> Case:
    k, n = rng.choice([32, 96]), rng.choice([8, 40])
    x, w = quantized(rng, P.INT8_ROW, 6, k), quantized(rng, P.INT8_ROW, n, k)
    return [x, w], lambda: hop.scaled(aten.mm.default, torch.float32, x, w.t())


def batch(rng: Rng) -> Case:
    q = Quantizer(INT8, (1, 1, -1))
    a, b = quantized(rng, q, 3, 5, 32), quantized(rng, Quantizer(INT8, (1, -1, 1)), 3, 32, 7)
    return [a, b], lambda: hop.scaled(aten.bmm.default, torch.float32, a, b)


def convolution(rng: Rng) -> Case:
    c, o = rng.choice([3, 16]), rng.choice([4, 16])
    size = rng.choice([5, 8])
    x = quantized(rng, rng.choice([P.UINT8_TENSOR_AFFINE, P.INT8_TENSOR]), 2, c, size, size)
    w = quantized(rng, P.INT8_CONV, o, c, 3, 3)
    if rng.random() < 0.3:
        w = hop.pack(w)
    args: list[Any] = [x, w, plain(rng, o) if rng.random() < 0.5 else None, [rng.choice([1, 2])] * 2, [1, 1]]
    read = [a for a in args[:3] if a is not None]
    if rng.random() < 0.4:
        scale, zero = torch.full((1, 1, 1, 1), 0.5), torch.full((1, 1, 1, 1), 7, dtype=torch.uint8)
        return [*read, scale, zero], lambda: hop.scaled(
            aten.conv2d.default, STATIC[1], *args, output_scale=scale, output_zero_point=zero
        )
    return read, lambda: hop.scaled(aten.conv2d.default, torch.float32, *args)


def embedding(rng: Rng) -> Case:
    w = quantized(rng, rng.choice([P.INT8_ROW, P.INT4_32, P.MXFP8]), 20, 64)
    index = torch.tensor([0, 3, 19])
    return [w, index], lambda: hop.scaled(aten.embedding.default, torch.float32, w, index)


def pointwise(rng: Rng) -> Case:
    a, b = quantized(rng, rng.choice(QUANTIZERS), 8, 64), quantized(rng, rng.choice(EXACT), 8, 64)
    op, args = rng.choice(
        [(aten.add.Tensor, (a, b)), (aten.mul.Tensor, (a, b)), (aten.relu.default, (a,)), (aten.cat.default, ([a, b],))]
    )
    return [a, b], lambda: hop.scaled(op, torch.float32, *args)


def quantize(rng: Rng) -> Case:
    q = rng.choice(QUANTIZERS)
    shape = rng.choice([(8, 64), (3, 5), (2, 3, 32), (1, 1), (128, 160), (2, 3, 4, 5)])
    x = plain(rng, *shape, dtype=rng.choice([torch.float32, torch.bfloat16, torch.float16]))
    return [x], lambda: hop.quantize(q, x)


def given(rng: Rng) -> Case:
    random_int8 = Quantizer(INT8, (1, 32), stochastic=True)
    q = rng.choice([P.INT8_ROW, P.UINT8_ROW_AFFINE, P.FP8_ROW, P.NVFP4, P.MXFP8, random_int8])
    x = plain(rng, 8, 64)
    shapes = q.buffers(x.shape)
    name = "global_amax" if "global_amax" in shapes else "scale"
    options: dict[str, Any] = {"scale": torch.rand(shapes[name][0]) * 0 + 0.5}
    if isinstance(q.scale, MinMax):
        options["zero_point"] = torch.full(shapes["zero_point"][0], 3, dtype=q.format.dtype)
    if q.stochastic:
        options["noise"] = guarded(torch.full(x.shape, 77, dtype=torch.uint8))
    function = rng.choice([hop.quantize, hop.fake_quantize])
    return [x, *options.values()], lambda: function(q, x, **options)


def dequantize(rng: Rng) -> Case:
    t = quantized(rng, rng.choice(QUANTIZERS), *rng.choice([(8, 64), (3, 5), (128, 160), (1, 1)]))
    if t.dim() == 2 and rng.random() < 0.2 and t.usages == ("rowwise",) and not t.quantizer.flat:
        t = hop.pack(t)
    dtype = rng.choice([None, torch.bfloat16])
    return [t], lambda: hop.dequantize(t, dtype)


def views(rng: Rng) -> Case:
    t = quantized(rng, rng.choice(QUANTIZERS), 8, 64)
    function: Callable[[], Any] = rng.choice(
        [
            *(lambda: t.t(), lambda: t[2:5], lambda: t[1], lambda: t[:, 32:], lambda: t.view(-1), lambda: t.clone()),
            *(lambda: t + 1, lambda: torch.cat([t, t]), lambda: t.to(torch.bfloat16), lambda: t.reshape(2, 4, 64)),
            *(lambda: torch.stack([t, t]), lambda: t.expand(2, 8, 64), lambda: t.detach(), lambda: t.sum()),
            *(lambda: torch.empty_like(t).copy_(t), lambda: hop.pack(t), lambda: t.index_select(0, torch.tensor([1]))),
            *(lambda: t.mT, lambda: t.permute(1, 0), lambda: t.split(4), lambda: t.float(), lambda: t.zero_()),
        ]
    )
    return [t], function


def unpack(rng: Rng) -> Case:
    t = hop.pack(quantized(rng, rng.choice([P.INT8_ROW, P.INT4_32]), rng.choice([8, 40]), 64))
    return [t], lambda: hop.unpack(t)


def noise(rng: Rng) -> Case:
    seed = torch.tensor(rng.getrandbits(60))
    return [seed], lambda: hop.noise(seed, (rng.choice([-1, 0, 1, 5, 33]), 7))


def integers(rng: Rng) -> Case:
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    a, b = (torch.randint(-128, 128, s, dtype=torch.int8, generator=generator) for s in ((6, 40), (40, 9)))
    a, b = guarded(a), guarded(b)
    if rng.random() < 0.5:
        return [a, b], lambda: hop.out_dtype(aten.mm.default, torch.int32, a, b)
    return [a, b], lambda: hop.out_dtype(aten.bmm.default, torch.int32, a.unsqueeze(0), b.unsqueeze(0))


def backward(rng: Rng) -> Case:
    x, w = plain(rng, 6, 64).requires_grad_(), quantized(rng, rng.choice(WEIGHTS), 16, 64)

    def call() -> Any:
        hop.scaled(aten.linear.default, torch.float32, hop.quantize(P.INT8_ROW, x), w).sum().backward()
        return x.grad

    return [x.detach(), w], call


def layer(rng: Rng) -> Case:
    model = torch.nn.Linear(64, 16)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(plain(rng, *p.shape))
    made = torch.nn.Sequential(model)
    hop.nn.convert(made, rng.choice([hop.schemes.INT8_DYNAMIC, hop.schemes.INT4_WEIGHT_32]))
    x = plain(rng, 5, 64)
    tensors = [made[0].weight.detach(), made[0].bias.detach(), x]
    return tensors, lambda: made(x).detach()


def step(rng: Rng) -> Case:
    p = torch.nn.Parameter(plain(rng, *rng.choice([(64, 64), (4096,), (3, 5)])))
    kind = rng.choice([hop.optim.AdamW8bit, hop.optim.AdamW4bit, hop.optim.SGD, hop.optim.Lion])
    options = {"momentum": 0.9} if kind is hop.optim.SGD else {}
    optimizer = kind([p], lr=1e-2, min_numel=1, **options)
    p.grad = plain(rng, *p.shape)
    optimizer.step()
    states = [x for x in optimizer.state[p].values() if isinstance(x, Tensor)]

    def call() -> Any:
        optimizer.step()
        return [p.detach(), *(x for x in optimizer.state[p].values() if isinstance(x, Tensor))]

    return [p.detach(), p.grad, *states, *states], call


def made(rng: Rng) -> Case:
    t = quantized(rng, rng.choice(QUANTIZERS), 8, 64)
    buffers = dict(t.buffers())

    def call() -> Any:
        own = Rng(buffers["codes"].numel())
        name = own.choice(list(buffers))
        shape = own.choice([tuple(t.shape), (8, 65), (-8, 64), (64, 8), ()])
        return hop.dequantize(QuantizedTensor({**buffers, name: buffers[name]}, t.quantizer, shape, torch.float32))

    return [*buffers.values()], call


CASES = [
    *(matmul, matmul, transposed, batch, convolution, convolution, embedding, pointwise, quantize, given, dequantize),
    *(views, views, unpack, noise, integers, backward, layer, step, made),
]


# ---- outcomes


def outcome(seed: int) -> tuple[str, Any]:
    """The outcome of the call with this seed: ("error", its type) or ("result", tensors)."""
    rng = Rng(seed)
    torch.manual_seed(seed)
    case = rng.choice(CASES)
    tensors, call = case(rng)
    if rng.random() < 0.5:
        with contextlib.suppress(*SANE):
            call()  # so that plans are known
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        change(rng, tensors)
    for t in tensors:
        fill_up(t)
    try:
        return "result", [x.clone() if memory.holds(x) else x.new_empty(0) for x in flat(call())]
    except SANE as error:
        return "error", error


def flat(x: Any) -> Iterator[Tensor]:
    """The plain tensors that a result is made of."""
    if isinstance(x, QuantizedTensor):
        yield from x.buffers().values()
    elif isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for v in x:
            yield from flat(v)


FLOAT_SUMS = frozenset({layer})
"""Cases whose sums are of floats, in an order that each kernel has of its own."""
_TERMS = 64  # of such a sum, each rounded to float32


def same(case: Any, a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether results are equal, bit for bit, but for the order of FLOAT_SUMS; NaN is NaN."""
    return len(a) == len(b) and all(_equal(x, y, case in FLOAT_SUMS) for x, y in zip(a, b, strict=True))


def _equal(x: Tensor, y: Tensor, float_sum: bool) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype or x.device != y.device or x.is_meta:
        return x.shape == y.shape and x.is_meta and y.is_meta
    if x.is_floating_point():
        x, y = x.to(torch.float64), y.to(torch.float64)
        if float_sum:
            known = x.isfinite() & y.isfinite()
            x, y = x[known], y[known]
            near = _TERMS * (2.0**-23 * y.abs().amax() + 2.0**-126) if y.numel() else 0.0  # which may be flushed
            return bool(((x - y).abs() <= near).all())
        return bool(((x == y) | (x.isnan() & y.isnan())).all())
    return torch.equal(x, y)


def broken(seed: int) -> str | None:
    """How the call with this seed breaks the rule, or None."""
    kind, found = outcome(seed)
    forget()
    if kind == "error":
        return None
    with native.use("off"):
        expected, reference = outcome(seed)
    forget()
    if expected == "error":
        return f"seed {seed}: a result, where PyTorch's operators raise {type(reference).__name__}: {reference}"
    case = Rng(seed).choice(CASES)
    return None if same(case, found, reference) else f"seed {seed}: the result is not that of PyTorch's operators"


def main(
    broken: Callable[[int], str | None], description: str | None, ready: Callable[[], None] = lambda: None
) -> None:
    """The command: a line for each seed that `broken` says something of, once `ready` is done."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ready()
    for seed in range(options.first, options.first + options.count):
        if options.report is not None:
            options.report.write_text(str(seed))
        try:
            found = broken(seed)
        except Exception as error:  # noqa: BLE001  no error that names what is wrong
            found = f"seed {seed}: {type(error).__name__}: {error}"
        forget()
        if found is not None:
            print(found, flush=True)
    print(f"{options.count} calls from seed {options.first}", flush=True)


if __name__ == "__main__":
    main(broken, __doc__)
