"""The routes that every operator takes: one function each, which fails unless the route gives what eager gives.

A route is called with one operator, or, where compiling dominates, with all of them as one program. `ROUTES` says which
suite runs it; `covered_pairs` is what test_coverage.py holds against the list of operators.
"""

import io
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import hop
from hop.impls.out_dtype import operator as out_dtype_operator
from tests.cases import (
    FLOAT,
    FORMATS,
    GRADIENT,
    INTEGER,
    OPERATORS,
    Format,
    Operator,
    arguments,
    assert_right,
    expected,
    is_index,
    tolerance,
)

Formats = list[Format]
VALUES = [INTEGER, FLOAT]


def call(operator: Operator, fmt: Format) -> tuple[Callable[..., Tensor], list[Tensor], Any]:
    """A function of tensors only, tensors for it, and what `assert_right` takes."""
    args, kwargs = arguments(operator, fmt)
    positions = [i for i, a in enumerate(args) if isinstance(a, Tensor)]

    def function(*tensors: Tensor) -> Tensor:
        filled = list(args)
        for i, x in zip(positions, tensors, strict=True):
            filled[i] = x
        return hop.out_dtype(operator.op, fmt.output, *filled, **kwargs)

    return function, [args[i] for i in positions], (operator, fmt, args, kwargs)


def differentiable(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]


def nodes(graph: torch.fx.Graph) -> int:
    """How many nodes of ours a graph holds."""
    ours = (out_dtype_operator, hop.out_dtype)
    return sum(node.target in ours for node in graph.nodes if node.op == "call_function")


class Program(torch.nn.Module):
    """All operators in all `formats`, as one module: tensors in, a list of results out."""

    def __init__(self, operators: list[Operator], formats: Formats) -> None:
        super().__init__()
        self.calls = [call(o, f) for o, f in itertools.product(operators, formats)]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(x for _, tensors, _ in self.calls for x in tensors)

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        rest, results = list(tensors), []
        for function, own, _ in self.calls:
            results.append(function(*rest[: len(own)]))
            del rest[: len(own)]
        return results

    def check(self, results: list[Tensor]) -> None:
        for (_, _, right), got in zip(self.calls, results, strict=True):
            assert_right(*right, got)


# ---- one operator at a time


def eager(operator: Operator, formats: Formats) -> None:
    for fmt in formats:
        function, tensors, right = call(operator, fmt)
        assert_right(*right, function(*tensors))


def full_path(operator: Operator, formats: Formats) -> None:
    """Through the dispatcher instead of around it: the same bits, the same strides."""
    for fmt in formats:
        function, tensors, _ = call(operator, fmt)
        fast = function(*tensors)
        with torch.device("cpu"):  # a function mode, which disables the fast path
            full = function(*tensors)
        assert torch.equal(fast, full) and fast.stride() == full.stride()


def reference(operator: Operator, formats: Formats) -> None:
    for fmt in formats:
        function, tensors, right = call(operator, fmt)
        _, _, args, kwargs = right
        got = out_dtype_operator.reference(operator.op, fmt.output, *args, **kwargs)
        assert_right(*right, got)
        assert got.stride() == function(*tensors).stride()


def fake(operator: Operator, formats: Formats) -> None:
    """Shape, dtype and strides without data."""
    for fmt in formats:
        function, tensors, _ = call(operator, fmt)
        real = function(*tensors)
        with FakeTensorMode() as mode:
            got = function(*(mode.from_tensor(x) for x in tensors))
        assert (got.shape, got.dtype, got.stride()) == (real.shape, real.dtype, real.stride())


def traced(operator: Operator, formats: Formats) -> None:
    for fmt in formats:
        function, tensors, right = call(operator, fmt)
        for mode, predispatch in (("real", False), ("fake", False), ("symbolic", False), ("fake", True)):
            graph = make_fx(function, tracing_mode=mode, pre_dispatch=predispatch)(*tensors)
            assert nodes(graph.graph) == 1, graph.code
            assert_right(*right, graph(*tensors))


def functionalized(operator: Operator, formats: Formats) -> None:
    for fmt in formats:
        function, tensors, right = call(operator, fmt)
        functional = torch.func.functionalize(function)
        assert_right(*right, functional(*tensors))
        assert nodes(make_fx(functional)(*tensors).graph) == 1


KEEP_NODE_UNDER_VMAP = {
    *("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "mv", "dot", "convolution", "conv1d", "conv2d", "conv3d"),
    *("conv_transpose2d", "add", "sub", "mul", "mul_scalar", "div", "div_scalar", "clamp"),
}


def vmapped(operator: Operator, formats: Formats) -> None:
    """Every choice of batched operands, with the batch first or last, against a loop over the batch."""
    for fmt in formats:
        function, tensors, right = call(operator, fmt)
        bound = 0.0 if fmt.is_integer else float(tolerance(*_cased(*right)).max())
        for chosen in itertools.product((None, 0, -1), repeat=len(tensors)):
            if all(dim is None for dim in chosen):
                continue
            batches = [_batch_of(x, dim) for x, dim in zip(tensors, chosen, strict=True)]
            members = [
                [b if dim is None else b.select(dim, i) for b, dim in zip(batches, chosen, strict=True)]
                for i in range(3)
            ]
            want = torch.stack([function(*member) for member in members])
            got = torch.func.vmap(function, in_dims=chosen)(*batches)
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            if fmt.is_integer:
                assert torch.equal(got, want), chosen
            else:  # both are rounded, and the bound holds for either
                assert bool(((got - want).abs() <= 2 * bound + want.abs() * torch.finfo(fmt.output).eps).all())
            if operator.name in KEEP_NODE_UNDER_VMAP:
                assert nodes(make_fx(torch.func.vmap(function, in_dims=chosen))(*batches).graph) == 1


def _batch_of(x: Tensor, dim: int | None) -> Tensor:
    if dim is None:
        return x
    flat = x.flatten()  # torch.flip and torch.roll lack the 8-bit floats and uint16
    members = [torch.cat([flat[shift:], flat[:shift]]).view(x.shape) for shift in range(3)]
    return torch.stack(members, 0).movedim(0, dim)


def _cased(operator: Operator, fmt: Format, args: Any, kwargs: Any) -> tuple[Any, ...]:
    return operator, fmt, args, kwargs, expected(operator, fmt, args, kwargs)


def scripted(operator: Operator, formats: Formats) -> None:
    """torch.jit.trace records the reference."""
    for fmt in formats:
        function, tensors, right = call(operator, fmt)
        graph = torch.jit.trace(function, tuple(tensors), check_trace=False)
        assert_right(*right, graph(*tensors))


def flops(operator: Operator, formats: Formats) -> None:
    """As many as the inner operator has."""
    for fmt in formats:
        function, tensors, (_, _, args, kwargs) = call(operator, fmt)
        with FlopCounterMode(display=False) as ours:
            function(*tensors)
        floats = [
            x.to(torch.float32) if isinstance(x, Tensor) and not is_index(operator, i) else x
            for i, x in enumerate(args)
        ]
        with FlopCounterMode(display=False) as inner:
            operator.op(*floats, **kwargs)
        assert ours.get_total_flops() == inner.get_total_flops()


def gradient(operator: Operator, formats: Formats) -> None:
    """Against differences, in float64, reverse and forward mode; in the dtype of each input."""
    function, tensors, _ = call(operator, GRADIENT)
    inputs = differentiable(tensors)
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True, fast_mode=True)
    for fmt in formats:
        if fmt.is_integer:
            continue
        function, tensors, _ = call(operator, fmt)
        inputs = differentiable(tensors)
        result = function(*inputs)
        assert result.requires_grad == any(x.requires_grad for x in inputs)
        if result.requires_grad:
            result.sum().backward()
        assert all(x.grad.dtype == x.dtype for x in inputs if x.requires_grad)


def double_backward(operator: Operator, formats: Formats) -> None:
    function, tensors, _ = call(operator, GRADIENT)
    assert torch.autograd.gradgradcheck(function, differentiable(tensors), fast_mode=True)


def forward_mode(operator: Operator, formats: Formats) -> None:
    """Dual tensors, when nothing requires a gradient: the tangent of the inner operator."""
    function, tensors, (_, _, args, kwargs) = call(operator, GRADIENT)
    tangents = [torch.randn_like(x) if x.is_floating_point() else None for x in tensors]
    with torch.autograd.forward_ad.dual_level():
        duals = _duals(tensors, tangents)
        got = torch.autograd.forward_ad.unpack_dual(function(*duals)).tangent
        filled = iter(_duals(tensors, tangents))
        inner = [next(filled) if isinstance(a, Tensor) else a for a in args]
        want = torch.autograd.forward_ad.unpack_dual(operator.op(*inner, **kwargs)).tangent
    assert got is not None
    torch.testing.assert_close(got, want)


def _duals(tensors: list[Tensor], tangents: list[Tensor | None]) -> list[Tensor]:
    return [
        x if t is None else torch.autograd.forward_ad.make_dual(x, t) for x, t in zip(tensors, tangents, strict=True)
    ]


def transforms(operator: Operator, formats: Formats) -> None:
    """torch.func: grad, vjp, jvp, jacrev, jacfwd, hessian, vmap of grad; each against the inner operator."""
    function, tensors, (_, _, args, kwargs) = call(operator, GRADIENT)
    where = next(i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point())
    rest = tensors[1:] if isinstance(args[0], Tensor) else tensors

    def ours(x: Tensor) -> Tensor:
        return function(x, *rest)

    def inner(x: Tensor) -> Tensor:
        return operator.op(*(x if i == where else a for i, a in enumerate(args)), **kwargs)

    x, t = tensors[0], torch.randn_like(tensors[0])

    def loss(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: (f(x) ** 3).sum()

    batch = torch.stack([x, 2 * x])
    for apply in (
        lambda f: torch.func.grad(loss(f))(x),
        lambda f: torch.func.vjp(f, x)[1](torch.ones_like(f(x)))[0],
        lambda f: torch.func.jvp(f, (x,), (t,)),
        lambda f: torch.func.jacrev(f)(x),
        lambda f: torch.func.jacfwd(f)(x),
        lambda f: torch.func.hessian(loss(f))(x),
        lambda f: torch.func.vmap(torch.func.grad(loss(f)))(batch),
        lambda f: torch.func.grad(lambda b: torch.func.vmap(loss(f))(b).sum())(batch),
    ):
        torch.testing.assert_close(apply(ours), apply(inner))


# ---- all operators as one program


def compiled(operators: list[Operator], formats: Formats, *, backend: str, dynamic: bool) -> None:
    program = Program(operators, formats)
    torch._dynamo.reset()
    function = torch.compile(program, backend=backend, dynamic=dynamic, fullgraph=True)
    program.check(function(*program.inputs))


def trained(operators: list[Operator], formats: Formats, *, backend: str) -> None:
    """Gradients through torch.compile equal those of eager."""
    program = Program(operators, [GRADIENT])
    torch._dynamo.reset()

    def gradients(function: Callable[..., Any]) -> list[Tensor]:
        inputs = differentiable(list(program.inputs))
        sum(y.sum() for y in function(*inputs)).backward()
        return [x.grad for x in inputs if x.requires_grad and x.grad is not None]

    got, want = gradients(torch.compile(program, backend=backend, fullgraph=True)), gradients(program)
    assert len(got) == len(want) > 0
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


def _export(operators: list[Operator], formats: Formats, strict: bool) -> tuple[Program, Any]:
    program = Program(operators, formats)
    exported = torch.export.export(program, program.inputs, strict=strict)
    assert nodes(exported.graph) == len(program.calls)
    return program, exported


def exported(operators: list[Operator], formats: Formats, *, strict: bool) -> None:
    program, ep = _export(operators, formats, strict)
    program.check(ep.module()(*program.inputs))


def saved(operators: list[Operator], formats: Formats) -> None:
    program, ep = _export(operators, formats, strict=False)
    file = io.BytesIO()
    torch.export.save(ep, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert nodes(loaded.graph) == len(program.calls)
    program.check(loaded.module()(*program.inputs))


def lowered(operators: list[Operator], formats: Formats) -> None:
    """Core ATen only, the same integers."""
    program, ep = _export(operators, formats, strict=False)
    low = ep.run_decompositions(hop.decompositions())
    targets = {node.target for node in low.graph.nodes if node.op == "call_function"}
    assert [t for t in targets if torch.Tag.core not in getattr(t, "tags", ())] == []
    program.check(low.module()(*program.inputs))


def aotinductor(operators: list[Operator], formats: Formats) -> None:
    program, ep = _export(operators, formats, strict=False)
    with tempfile.TemporaryDirectory() as folder:
        path = torch._inductor.aoti_compile_and_package(ep, package_path=str(Path(folder) / "program.pt2"))
        program.check(torch._inductor.aoti_load_package(path)(*program.inputs))


@dataclass(frozen=True)
class Route:
    name: str
    run: Callable[..., None]
    batched: bool = False  # takes all operators at once
    compiler: bool = False  # needs a C++ compiler


ROUTES = [
    Route("eager", eager),
    Route("full_path", full_path),
    Route("reference", reference),
    Route("fake", fake),
    Route("make_fx", traced),
    Route("functionalize", functionalized),
    Route("vmap", vmapped),
    Route("jit_trace", scripted),
    Route("flops", flops),
    Route("grad", gradient),
    Route("double_backward", double_backward),
    Route("jvp", forward_mode),
    Route("func", transforms),
    Route("aot_eager", lambda o, f: compiled(o, f, backend="aot_eager", dynamic=False), batched=True),
    Route("aot_eager_dynamic", lambda o, f: compiled(o, f, backend="aot_eager", dynamic=True), batched=True),
    Route("aot_eager_training", lambda o, f: trained(o, f, backend="aot_eager"), batched=True),
    Route("inductor", lambda o, f: compiled(o, f, backend="inductor", dynamic=False), batched=True, compiler=True),
    Route(
        "inductor_dynamic", lambda o, f: compiled(o, f, backend="inductor", dynamic=True), batched=True, compiler=True
    ),
    Route("inductor_training", lambda o, f: trained(o, f, backend="inductor"), batched=True, compiler=True),
    Route("export_strict", lambda o, f: exported(o, f, strict=True), batched=True),
    Route("export_nonstrict", lambda o, f: exported(o, f, strict=False), batched=True),
    Route("save_load", saved, batched=True),
    Route("run_decompositions", lowered, batched=True),
    Route("aotinductor", aotinductor, batched=True, compiler=True),
]
SINGLE = [r for r in ROUTES if not r.batched]
BATCHED = [r for r in ROUTES if r.batched]
ALL_FORMATS = FORMATS
ALL_OPERATORS = OPERATORS
