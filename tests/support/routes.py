"""The routes that every operator takes: one function each, which fails unless the route gives what eager gives.

A route is called with cases: calls of one operator, or, where compiling dominates, of all of them, as one program; and
with those of them that are differentiated. `ROUTES` says which suite runs it; test_coverage.py holds what ran against
the list of operators.
"""

import functools
import itertools
import operator
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import hop
from hop.dispatch import hop as _hop
from hop.tensor.from_codes import from_buffers_operator
from tests.support import case as case_module
from tests.support.case import Case
from tests.support.files import reloaded

Cases = list[Case]


def differentiable(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]


def nodes(graph: torch.fx.Graph) -> int:
    """How many nodes of ours a graph holds, as the operator or as the public function that Dynamo records. Making a
    tensor of its buffers does not count.
    """
    ours = {*_hop.hops, hop.out_dtype} - {from_buffers_operator}
    return sum(node.target in ours for node in graph.nodes if node.op == "call_function")


def below(case: Case) -> int:
    """How many nodes of ours a graph of `case` has that was traced below autograd."""
    return case.nodes_below or case.nodes


class Program(torch.nn.Module):
    """All cases as one module: tensors in, a list of results out."""

    def __init__(self, cases: Cases) -> None:
        super().__init__()
        self.cases = cases

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(x for case in self.cases for x in case.tensors)

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        rest, results = list(tensors), []
        for case in self.cases:
            results.append(case.function(*rest[: len(case.tensors)]))
            del rest[: len(case.tensors)]
        return results

    def check(self, results: list[Tensor]) -> None:
        for case, got in zip(self.cases, results, strict=True):
            case.check(got)


# ---- one operator at a time


def eager(cases: Cases, gradients: Cases) -> None:
    for case in cases:
        case.check(case.function(*case.tensors))


def full_path(cases: Cases, gradients: Cases) -> None:
    """Through the dispatcher instead of around it: the same bits, the same strides."""
    for case in cases:
        fast = case.function(*case.tensors)
        with torch.device(case_module.DEVICE):  # a function mode, which disables the fast path
            full = case.function(*case.tensors)
        assert torch.equal(fast, full) and fast.stride() == full.stride()


def reference(cases: Cases, gradients: Cases) -> None:
    for case in cases:
        got = case.reference(*case.tensors)
        case.check(got)
        assert got.stride() == case.function(*case.tensors).stride()


def fake(cases: Cases, gradients: Cases) -> None:
    """Shape, dtype and strides without data."""
    for case in cases:
        real = case.function(*case.tensors)
        with FakeTensorMode() as mode:
            got = case.function(*(mode.from_tensor(x) for x in case.tensors))
        assert (got.shape, got.dtype, got.stride()) == (real.shape, real.dtype, real.stride())


def traced(cases: Cases, gradients: Cases) -> None:
    for case in cases:
        for mode, predispatch in (("real", False), ("fake", False), ("symbolic", False), ("fake", True)):
            graph = make_fx(case.function, tracing_mode=mode, pre_dispatch=predispatch)(*case.tensors)
            assert nodes(graph.graph) == (case.nodes if predispatch else below(case)), graph.code
            case.check(graph(*case.tensors))


def functionalized(cases: Cases, gradients: Cases) -> None:
    for case in cases:
        functional = torch.func.functionalize(case.function)
        case.check(functional(*case.tensors))
        assert nodes(make_fx(functional)(*case.tensors).graph) == below(case)


def vmapped(cases: Cases, gradients: Cases, *, every: bool = False) -> None:
    """Choices of batched operands, with the batch first or last, against a loop over the batch. Of three, each choice
    for two of them is there, or with `every` each for all; of more, each alone and all."""
    for case in cases:
        for chosen in _choices(len(case.tensors), every):
            batches = [_batch_of(x, dim) for x, dim in zip(case.tensors, chosen, strict=True)]
            members = [
                [b if dim is None else b.select(dim, i) for b, dim in zip(batches, chosen, strict=True)]
                for i in range(3)
            ]
            want = torch.stack([case.function(*member) for member in members])
            got = torch.func.vmap(case.function, in_dims=chosen)(*batches)
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            if case.bound == 0:
                assert torch.equal(got, want), chosen
            else:  # both are rounded, and the bound holds for either
                assert bool(((got - want).abs() <= 2 * case.bound + want.abs() * torch.finfo(want.dtype).eps).all())
            if case.keeps_nodes_under_vmap:
                graph = make_fx(torch.func.vmap(case.function, in_dims=chosen))(*batches).graph
                assert nodes(graph) == case.nodes


def _choices(count: int, every_of_three: bool) -> list[tuple[int | None, ...]]:
    """The batch dimension of each operand, None for none."""
    dims = (None, 0, -1)
    every = itertools.product(dims, repeat=count)
    if count == 3 and not every_of_three:  # the third follows from the others, and differs in each row and column
        every = ((dims[i], dims[j], dims[(i + j + 1) % 3]) for i, j in itertools.product(range(3), repeat=2))
    if count > 3:
        one = [tuple(dim if i == k else None for i in range(count)) for k in range(count) for dim in (0, -1)]
        every = [*one, (0,) * count, (-1,) * count]
    return [chosen for chosen in every if any(dim is not None for dim in chosen)]


def _batch_of(x: Tensor, dim: int | None) -> Tensor:
    if dim is None:
        return x
    flat = x.flatten()  # torch.flip and torch.roll lack the 8-bit floats and uint16
    members = [torch.cat([flat[shift:], flat[:shift]]).view(x.shape) for shift in range(3)]
    return torch.stack(members, 0).movedim(0, dim)


def flops(cases: Cases, gradients: Cases) -> None:
    """Check that the call counts as many FLOPs as the inner operator."""
    for case in cases:
        with FlopCounterMode(display=False) as ours:
            case.function(*case.tensors)
        with FlopCounterMode(display=False) as inner:
            case.inner(*case.tensors)
        assert ours.get_total_flops() == inner.get_total_flops()


def gradient(cases: Cases, gradients: Cases) -> None:
    """Against differences, in float64, reverse and forward mode, or against the inner function; in the dtype of each
    input."""
    for case in gradients:
        inputs = differentiable(case.tensors)
        if case.smooth:
            assert torch.autograd.gradcheck(
                case.function, inputs, check_forward_ad=True, check_batched_grad=True, fast_mode=True
            )
        else:
            for got, want in zip(_vjp(case.function, case), _vjp(case.inner, case), strict=True):
                _assert_close(got, want)
    for case in cases:
        if not case.differentiable:
            continue
        inputs = differentiable(case.tensors)
        result = case.function(*inputs)
        wanted = result.is_floating_point() and any(x.requires_grad for x in inputs)
        assert result.requires_grad == wanted
        if wanted:
            result.sum().backward()
            assert all(x.grad.dtype == x.dtype for x in inputs if x.requires_grad)


def _assert_close(got: Tensor, want: Tensor) -> None:
    """Up to the rounding of sums in float32 and of results in their dtype."""
    share = max(1e-4, 2 * torch.finfo(want.dtype).eps)
    torch.testing.assert_close(got, want, rtol=share, atol=share * float(want.abs().max()))


def _vjp(function: Callable[..., Tensor], case: Case) -> list[Tensor]:
    inputs = differentiable(case.tensors)
    out = function(*inputs)
    direction = torch.linspace(-1, 2, out.numel(), dtype=out.dtype, device=out.device).reshape(out.shape)
    return list(torch.autograd.grad(out, [x for x in inputs if x.requires_grad], direction))


def double_backward(cases: Cases, gradients: Cases) -> None:
    for case in gradients:
        if case.smooth:
            assert torch.autograd.gradgradcheck(case.function, differentiable(case.tensors), fast_mode=True)
        else:
            got, want = (_jvp_by_double_backward(f, case) for f in (case.function, case.inner))
            _assert_close(got, want)


def _jvp_by_double_backward(function: Callable[..., Tensor], case: Case) -> Tensor:
    """The gradient is linear in the gradient of the result: its derivative by that is the product with a direction."""
    inputs = differentiable(case.tensors)
    out = function(*inputs)
    given = torch.ones_like(out).requires_grad_()
    grads = torch.autograd.grad(out, [x for x in inputs if x.requires_grad], given, create_graph=True)
    total = sum(
        (g * torch.linspace(1, 2, g.numel(), dtype=g.dtype, device=g.device).reshape(g.shape)).sum() for g in grads
    )
    (back,) = torch.autograd.grad(total, given)  # type: ignore[arg-type]
    return back


def forward_mode(cases: Cases, gradients: Cases) -> None:
    """Dual tensors, when nothing requires a gradient: the tangent of the inner operator, by each operand alone and by
    all. The call runs before without tangents, so that what was found for it is there to be taken."""
    for case in gradients:
        with torch.autograd.forward_ad.dual_level():
            for _ in range(2):
                assert torch.autograd.forward_ad.unpack_dual(case.function(*case.tensors)).tangent is None
        for tangents in _each_and_all(case.tensors):

            def dual(function: Callable[..., Tensor], case: Case = case, tangents: Any = tangents) -> Any:
                with torch.autograd.forward_ad.dual_level():
                    return torch.autograd.forward_ad.unpack_dual(function(*_duals(case.tensors, tangents)))

            got, want = dual(case.function), dual(case.inner)
            assert (got.tangent is None) == (want.tangent is None)
            if want.tangent is not None:
                _assert_close(got.tangent, want.tangent)
            assert torch.equal(got.primal, case.function(*case.tensors))


def _each_and_all(tensors: list[Tensor]) -> list[list[Tensor | None]]:
    """Tangents of each float tensor by itself, and of all."""
    every = [torch.randn_like(x) if x.is_floating_point() else None for x in tensors]
    floats = [i for i, t in enumerate(every) if t is not None]
    alone: list[list[Tensor | None]] = [[t if i == k else None for i, t in enumerate(every)] for k in floats]
    return [*alone, every] if len(floats) > 1 else [every]


def _duals(tensors: list[Tensor], tangents: list[Tensor | None]) -> list[Tensor]:
    return [
        x if t is None else torch.autograd.forward_ad.make_dual(x, t) for x, t in zip(tensors, tangents, strict=True)
    ]


def transforms(cases: Cases, gradients: Cases) -> None:
    """torch.func: grad, vjp, jvp, jacrev, jacfwd, hessian, vmap of grad; each against the inner operator."""
    for case in gradients:
        where = next(i for i, x in enumerate(case.tensors) if x.is_floating_point())
        x = case.tensors[where]
        t = torch.randn_like(x)

        def of_one(
            function: Callable[..., Tensor], case: Case = case, where: int = where
        ) -> Callable[[Tensor], Tensor]:
            return lambda z: function(*(z if i == where else y for i, y in enumerate(case.tensors)))

        def loss(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda z: (f(z) ** 3).sum()

        batch = torch.stack([x, 2 * x])
        reverse = (
            lambda f, x=x: torch.func.grad(loss(f))(x),
            lambda f, x=x: torch.func.vjp(f, x)[1](torch.ones_like(f(x)))[0],
            lambda f, x=x: torch.func.jacrev(f)(x),
            lambda f, b=batch: torch.func.vmap(torch.func.grad(loss(f)))(b),
            lambda f, b=batch: torch.func.grad(lambda b: torch.func.vmap(loss(f))(b).sum())(b),
        )
        forward = (
            lambda f, x=x, t=t: torch.func.jvp(f, (x,), (t,)),
            lambda f, x=x: torch.func.jacfwd(f)(x),
            lambda f, x=x: torch.func.hessian(loss(f))(x),
        )
        for apply in reverse + forward:
            got, want = (tree_leaves(apply(of_one(f))) for f in (case.function, case.inner))
            for g, w in zip(got, want, strict=True):
                _assert_close(g, w)


# ---- all operators as one program


def compiled(cases: Cases, *, backend: str, dynamic: bool) -> None:
    program = Program(cases)
    torch._dynamo.reset()
    function = torch.compile(program, backend=backend, dynamic=dynamic, fullgraph=True)
    program.check(function(*program.inputs))


def trained(gradients: Cases, *, backend: str) -> None:
    """Gradients through torch.compile equal those of eager."""
    program = Program(gradients)
    torch._dynamo.reset()

    def gradients_of(function: Callable[..., Any]) -> list[Tensor]:
        inputs = differentiable(list(program.inputs))
        sum(y.sum() for y in function(*inputs)).backward()
        return [x.grad for x in inputs if x.requires_grad and x.grad is not None]

    got, want = gradients_of(torch.compile(program, backend=backend, fullgraph=True)), gradients_of(program)
    assert len(got) == len(want) > 0
    for g, w in zip(got, want, strict=True):
        _assert_close(g, w)


def pushed_forward(gradients: Cases, *, backend: str) -> None:
    """torch.func.jvp of a compiled program gives the values and the tangents of dual tensors in eager mode."""
    program = Program(gradients)
    floats = [x for x in program.inputs if x.is_floating_point()]
    tangents = [torch.randn_like(x) for x in floats]

    def function(inputs: tuple[Tensor, ...], floats: tuple[Tensor, ...], directions: tuple[Tensor, ...]) -> Any:
        def of_floats(*given: Tensor) -> tuple[Tensor, ...]:
            rest = list(given)
            return tuple(program(*(rest.pop(0) if x.is_floating_point() else x for x in inputs)))

        return torch.func.jvp(of_floats, floats, directions)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    values, found = compiled(program.inputs, tuple(floats), tuple(tangents))
    rest = list(tangents)
    for case, value, tangent in zip(gradients, values, found, strict=True):
        with torch.autograd.forward_ad.dual_level():
            duals = _duals(case.tensors, [rest.pop(0) if x.is_floating_point() else None for x in case.tensors])
            want = torch.autograd.forward_ad.unpack_dual(case.function(*duals))
        _assert_close(value, want.primal)
        _assert_close(tangent, want.tangent)


def _export(cases: Cases, strict: bool) -> tuple[Program, Any]:
    program = Program(cases)
    exported = torch.export.export(program, program.inputs, strict=strict)
    assert nodes(exported.graph) == sum(case.nodes for case in cases)
    return program, exported


@functools.lru_cache(maxsize=1)  # of the same cases, which routes take one after another
def _shared_export(*cases: Case) -> tuple[Program, Any]:
    return _export(list(cases), strict=False)


def exported(cases: Cases, *, strict: bool) -> None:
    program, ep = _export(cases, strict) if strict else _shared_export(*cases)
    program.check(ep.module()(*program.inputs))


def saved(cases: Cases, gradients: Cases) -> None:
    program, ep = _shared_export(*cases)
    loaded = reloaded(ep)
    assert nodes(loaded.graph) == nodes(ep.graph)
    program.check(loaded.module()(*program.inputs))


def lowered(cases: Cases, gradients: Cases) -> None:
    """Core ATen only, the same integers."""
    program, ep = _shared_export(*cases)
    low = ep.run_decompositions(hop.decompositions())
    targets = {node.target for node in low.graph.nodes if node.op == "call_function"}
    targets.discard(operator.getitem)  # of core operators with several results, such as max_pool2d_with_indices
    assert [t for t in targets if torch.Tag.core not in getattr(t, "tags", ())] == []
    program.check(low.module()(*program.inputs))


def aotinductor(cases: Cases, gradients: Cases) -> None:
    program, ep = _shared_export(*cases)
    with tempfile.TemporaryDirectory() as folder:
        path = torch._inductor.aoti_compile_and_package(ep, package_path=str(Path(folder) / "program.pt2"))
        program.check(torch._inductor.aoti_load_package(path)(*program.inputs))


@dataclass(frozen=True)
class Route:
    name: str
    run: Callable[..., None]
    batched: bool = False  # takes the cases of all operators at once
    compiler: bool = False  # needs a C++ compiler
    differentiates: bool = False  # takes the cases that are differentiated alone


ROUTES = [
    Route("eager", eager),
    Route("full_path", full_path),
    Route("reference", reference),
    Route("fake", fake),
    Route("make_fx", traced),
    Route("functionalize", functionalized),
    Route("vmap", vmapped),
    Route("flops", flops),
    Route("grad", gradient),
    Route("double_backward", double_backward, differentiates=True),
    Route("jvp", forward_mode, differentiates=True),
    Route("func", transforms, differentiates=True),
    Route("aot_eager", lambda c, g: compiled(c, backend="aot_eager", dynamic=False), batched=True),
    Route("aot_eager_dynamic", lambda c, g: compiled(c, backend="aot_eager", dynamic=True), batched=True),
    Route("aot_eager_training", lambda c, g: trained(g, backend="aot_eager"), batched=True, differentiates=True),
    Route("aot_eager_jvp", lambda c, g: pushed_forward(g, backend="aot_eager"), batched=True, differentiates=True),
    Route("inductor", lambda c, g: compiled(c, backend="inductor", dynamic=False), batched=True, compiler=True),
    Route("inductor_dynamic", lambda c, g: compiled(c, backend="inductor", dynamic=True), batched=True, compiler=True),
    Route("inductor_training", lambda c, g: trained(g, backend="inductor"), batched=True, compiler=True,
        differentiates=True),
    Route("export_strict", lambda c, g: exported(c, strict=True), batched=True),
    Route("export_nonstrict", lambda c, g: exported(c, strict=False), batched=True),
    Route("save_load", saved, batched=True),
    Route("run_decompositions", lowered, batched=True),
    Route("aotinductor", aotinductor, batched=True, compiler=True),
]  # fmt: skip
SINGLE = [r for r in ROUTES if not r.batched]
BATCHED = [r for r in ROUTES if r.batched]
