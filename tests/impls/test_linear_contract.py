"""hop.nn.Linear's own operators: what they save, and that their fakes are what they really return."""

import itertools
import unittest
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import hop
from hop.impls.quantized.contract import Contract, Needs, Options
from hop.impls.quantized.linear import linear, linear_backward, linear_forward
from hop.numerics.copies import COLUMNWISE, ROWWISE
from hop.numerics.scale_rules import Static
from hop.numerics.schemes import ORIGINAL, Scheme
from hop.tensor.proto import TensorProto
from tests.support.schemes import CROSSED

aten = torch.ops.aten
INT8 = hop.presets.INT8_ROW
ALL_SCHEMES = [
    *CROSSED.items(),
    ("ORIGINAL", Scheme(INT8, INT8, backward=ORIGINAL)),
    ("TENSORS", Scheme(hop.presets.INT8_TENSOR, hop.presets.INT8_TENSOR, grad=INT8, backward="quantized")),
    ("FLOATS_AND_INT8", Scheme(None, INT8)),
    ("INT8_AND_FLOATS", Scheme(INT8, None)),
]
FLAGS = list(itertools.product((False, True), repeat=3))  # x, weight, bias
M, K, N = 8, 64, 48


def scales_of(scheme: Scheme, requires_grad: bool = False) -> hop.Scales:
    """Those that the scheme does not find itself."""
    found: dict[str, Tensor] = {}
    for role in ("lhs", "rhs", "grad"):
        q = getattr(scheme, role)
        if q is None or q.scale.missing() is None:
            continue
        found[role] = torch.full((1, 1), 0.02 if isinstance(q.scale, Static) else 2.0, requires_grad=requires_grad)
        if q.scale.has_zero_point():
            found[f"{role}_zero_point"] = torch.full((1, 1), 3.0, requires_grad=requires_grad)
    return hop.Scales(**found)


def operands(flags: Any = FLAGS[-1], bias: bool = True, dtype: torch.dtype = torch.bfloat16, lead: Any = (2, 4)) -> Any:
    torch.manual_seed(0)
    found = [torch.randn(*lead, K), torch.randn(N, K), torch.randn(N) if bias else None]
    return [None if t is None else t.to(dtype).requires_grad_(flag) for t, flag in zip(found, flags, strict=True)]


def described(tensors: list[Tensor]) -> list[Any]:
    return [(tuple(t.shape), t.dtype, t.stride(), t.device.type) for t in tensors]


def of_protos(protos: list[TensorProto | None]) -> list[Any]:
    return [(tuple(b.shape), b.dtype) for p in protos if p is not None for b in p.buffers()]


class Call:
    """One call of both operators, on real tensors or on fake ones."""

    def __init__(self, scheme: Scheme, needs: Needs, bias: bool, options: Options, held: list[Tensor]) -> None:
        self.scales = scales_of(scheme)
        given = (self.scales.lhs is not None, self.scales.rhs is not None)
        self.contract = Contract(scheme, needs, options, given)
        self.node = (str(scheme), torch.bfloat16, list(needs), list(options))
        self.seed = torch.tensor(5) if scheme.is_stochastic() else None
        self.x, self.weight, self.bias = operands((False,) * 3, bias)
        self.held = held

    def run(self) -> tuple[list[Tensor], list[Tensor]]:
        contract, of = self.contract, (TensorProto.of(self.x), TensorProto.of(self.weight))
        forward = linear_forward(*self.node, self.seed, *self.scales, self.x, self.weight, self.bias, self.held)
        if not any(contract.needs):
            return forward, []
        copies = [contract.copy_of_x(of[0]), contract.copy_of_weight(of[1])]
        count = len(of_protos(copies[:1]))
        kept = contract.kept_of_weight(of[1])
        of_weight = self.held or forward[1 + count :]
        if kept is not None:
            named = dict(zip([b.name for b in kept.buffers()], of_weight, strict=True))
            of_weight = [named[b.name] for b in copies[1].buffers()] if copies[1] is not None else []
        tensors = [t for t in (self.x, self.weight, self.bias) if t is not None]
        shapes, dtypes = [list(t.shape) for t in tensors], [t.dtype for t in tensors]
        x = self.x if contract.of_x().original else None
        weight = self.weight if contract.of_weight().original else None
        grad = torch.ones_like(forward[0])
        backward = linear_backward(
            *self.node, shapes, dtypes, self.seed, *self.scales, grad, x, weight, forward[1 : 1 + count], of_weight
        )
        return forward, backward

    def to_fake(self, mode: FakeTensorMode) -> None:
        def fake(t: Any) -> Any:
            return mode.from_tensor(t) if isinstance(t, Tensor) else t

        self.scales = hop.Scales(*map(fake, self.scales))
        self.seed, self.x, self.weight, self.bias = map(fake, (self.seed, self.x, self.weight, self.bias))
        self.held = [fake(t) for t in self.held]


class TestFakes(unittest.TestCase):
    """Number, shape, dtype and stride of what the fakes return, against what the operators do."""

    @parameterized.expand(ALL_SCHEMES)
    @pytest.mark.sampled(2)
    @pytest.mark.full
    def test_product(self, _name, scheme):
        choices = itertools.product(FLAGS, (False, True), (False, True), ("no", "miss", "hit"))
        for flags, bias, save_original, keep in choices:
            if flags[2] and not bias:
                continue
            options = Options(save_original, keep != "no")
            held: list[Tensor] = []
            if keep == "hit":
                first = Call(scheme, Needs(), bias, options, [])
                held = first.run()[0][1:]
            call = Call(scheme, Needs(*flags), bias, options, held)
            real = call.run()
            with FakeTensorMode() as mode:
                call.to_fake(mode)
                fake = call.run()
            at = (flags, bias, save_original, keep)
            assert [described(t) for t in fake] == [described(t) for t in real], at
            copies = call.contract.forward(TensorProto.of(call.x), TensorProto.of(call.weight), bool(held))
            assert of_protos(copies) == [(tuple(t.shape), t.dtype) for t in real[0][1:]], at
            assert len(real[1]) == sum(flags), at


class TestContract(unittest.TestCase):
    """Which copies there are."""

    def _saved(self, scheme, flags, **options):
        scales = scales_of(scheme)
        contract = Contract(scheme, Needs(*flags), Options(**options), (scales.lhs is not None, scales.rhs is not None))
        return contract.of_x(), contract.of_weight()

    @parameterized.expand(ALL_SCHEMES)
    def test_only_what_is_needed(self, _name, scheme):
        for flags in FLAGS:
            of_x, of_weight = self._saved(scheme, flags)
            masks = scheme.backward != "quantized"
            clipped = [
                q is not None and masks and (isinstance(q.scale, Static) or q.scale.clips())
                for q in (scheme.lhs, scheme.rhs)
            ]
            assert (of_x != (False, None)) == (flags[1] or (flags[0] and clipped[0])), flags
            assert (of_weight != (False, None)) == (flags[0] or (flags[1] and clipped[1])), flags
            for saved in (of_x, of_weight):
                assert not (saved.original and saved.usage)

    @parameterized.expand(
        [
            ("rows_leave_the_sum", CROSSED["INT8_TRAINING"], ROWWISE),
            ("blocks_do_not", CROSSED["MXFP8_TRAINING"], COLUMNWISE),
            ("two_levels_do_not", CROSSED["NVFP4_TRAINING"], COLUMNWISE),
            ("ste_reads_the_forward's", CROSSED["INT8_DYNAMIC"], ROWWISE),
        ]
    )
    def test_which_copy(self, _name, scheme, usage):
        of_x, of_weight = self._saved(scheme, (True, True, False))
        assert of_x == of_weight == (False, usage)


def saved_by(function: Any) -> list[Tensor]:
    """What autograd saves in a call."""
    found: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        found.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function()
    return found


class TestSaved(unittest.TestCase):
    def _of(self, scheme, flags, **options):
        args = operands(flags)
        found = saved_by(lambda: linear(scheme, *args, scales=scales_of(scheme), options=Options(**options)))
        return args, [t for t in found if t.numel() > 1]

    def test_nothing(self):
        assert self._of(CROSSED["INT8_TRAINING"], (False,) * 3)[1] == []
        assert self._of(CROSSED["INT8_TRAINING"], (False, False, True))[1] == []

    def test_codes_and_their_scales(self):
        _, found = self._of(CROSSED["INT8_TRAINING"], FLAGS[-1])
        assert [(tuple(t.shape), t.dtype) for t in found] == [
            ((2, 4, K), torch.int8),
            ((2, 4, 1), torch.float32),
            ((N, K), torch.int8),
            ((N, 1), torch.float32),
        ]

    def test_columns_alone(self):
        _, found = self._of(CROSSED["MXFP8_TRAINING"], FLAGS[-1])
        assert [tuple(t.shape) for t in found] == [(K, M), (K, 1), (K, N), (K, 2)]

    def test_aliases(self):
        for scheme, options in ((CROSSED["INT8_TRAINING"], {"save_original": True}), (ALL_SCHEMES[11][1], {})):
            args, found = self._of(scheme, FLAGS[-1], **options)
            assert [t.data_ptr() for t in found] == [t.data_ptr() for t in args[:2]]


def gradients(y: Tensor, tensors: Any) -> list[Any]:
    torch.manual_seed(7)
    y.backward(torch.randn_like(y))
    return [None if t is None else t.grad for t in tensors]


def same(a: Any, b: Any) -> bool:
    return (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))


class TestGradients(unittest.TestCase):
    @parameterized.expand(ALL_SCHEMES)
    @pytest.mark.quick(9)
    def test_those_of_quantized(self, _name, scheme):
        """Bit for bit."""
        for flags, save_original, dtype in itertools.product(FLAGS, (False, True), (torch.bfloat16, torch.float32)):
            results = []
            for own in (True, False):
                args, scales = operands(flags, dtype=dtype), scales_of(scheme)
                torch.manual_seed(1)
                if own:
                    y, _ = linear(scheme, *args, scales=scales, options=Options(save_original))
                else:
                    y = hop.quantized(aten.linear.default, scheme, *args, scales=scales)
                results.append([y, *(gradients(y, args) if any(flags) else [])])
            assert all(map(same, *results)), (flags, save_original, dtype)

    @parameterized.expand([("one", (K,)), ("three", (2, 2, 2)), ("no_rows", (0,))])
    def test_sizes(self, name, lead):
        for scheme in (CROSSED["INT8_TRAINING"], CROSSED["INT8_DYNAMIC"], CROSSED["MXFP8_TRAINING"]):
            results = []
            for own in (True, False):
                args = operands(lead=() if name == "one" else lead)
                torch.manual_seed(1)
                if own:
                    y, _ = linear(scheme, *args, scales=hop.Scales(), options=Options())
                else:
                    y = hop.quantized(aten.linear.default, scheme, *args)
                results.append([y, *gradients(y, args)])
            assert all(map(same, *results)), scheme

    @parameterized.expand(
        [
            (f"{name}_{autocast}", CROSSED[name], autocast)
            for name in ("INT8_DYNAMIC", "MXFP8_TRAINING")
            for autocast in (False, True)
        ]
    )
    def test_mixed_dtypes(self, _name, scheme, autocast):
        results = []
        for own in (True, False):
            x, weight, bias = operands(dtype=torch.float32)
            x = x.detach().to(torch.bfloat16).requires_grad_()
            torch.manual_seed(1)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                if own:
                    y, _ = linear(scheme, x, weight, bias, scales=hop.Scales(), options=Options())
                else:
                    y = hop.quantized(aten.linear.default, scheme, x, weight, bias)
            results.append([y, *gradients(y, (x, weight, bias))])
        assert all(map(same, *results))

    def test_learned_scales(self):
        q = hop.Quantizer(hop.formats.INT8, (-1, -1), Static(affine=True))
        scheme, results = Scheme(q, q), []
        for own in (True, False):
            args, scales = operands(), scales_of(scheme, requires_grad=True)
            if own:
                y, _ = linear(scheme, *args, scales=scales, options=Options())
            else:
                y = hop.quantized(aten.linear.default, scheme, *args, scales=scales)
            results.append([y, *gradients(y, (*args, *scales[:4]))])
        assert all(map(same, *results)) and all(g is not None for g in results[0])

    def test_of_gradients(self):
        scheme, results = CROSSED["INT8_TRAINING"], []
        for own in (True, False):
            args = operands(dtype=torch.float32)
            torch.manual_seed(1)
            if own:
                y, _ = linear(scheme, *args, scales=hop.Scales(), options=Options(save_original=True))
            else:
                y = hop.quantized(aten.linear.default, scheme, *args)
            first = torch.autograd.grad(y.square().sum(), args, create_graph=True)
            results.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), args)])
        assert all(map(same, *results))

    def test_of_gradients_needs_the_operands(self):
        args = operands()
        y, _ = linear(CROSSED["INT8_TRAINING"], *args, scales=hop.Scales(), options=Options())
        with pytest.raises(RuntimeError, match="save_original=True"):
            torch.autograd.grad(y.sum(), args, create_graph=True)

    def test_weight_may_change_before_the_backward(self):
        args = operands((True, True, False))
        y, _ = linear(CROSSED["INT8_TRAINING"], *args, scales=hop.Scales(), options=Options())
        with torch.no_grad():
            args[1].zero_()
        assert gradients(y, args)[0].any()


class TestMainGrad(unittest.TestCase):
    def _layer(self, scheme=CROSSED["INT8_TRAINING"]):
        torch.manual_seed(0)
        return hop.nn.Linear(K, N, scheme=scheme)

    @parameterized.expand([("eager", None), ("compiled", "aot_eager")])
    @pytest.mark.quick(2)
    def test_accumulates(self, _name, backend):
        plain, fused = self._layer(), self._layer()
        fused.weight.main_grad = torch.ones(N, K, dtype=torch.float64)
        call = fused if backend is None else torch.compile(fused, backend=backend, fullgraph=True)
        total = torch.ones(N, K, dtype=torch.float64)
        for i in range(2):
            x = torch.randn(M, K, generator=torch.Generator().manual_seed(i))
            for layer in (plain, call):
                torch.manual_seed(2)
                plain.zero_grad()
                layer(x).square().sum().backward()
                if layer is not call:
                    assert plain.weight.grad is not None
                    total += plain.weight.grad
        assert fused.weight.grad is None and torch.equal(fused.weight.main_grad, total)
        assert fused.bias.grad is not None

    def test_errors(self):
        layer = self._layer()
        for bad, error in (
            (torch.zeros(K, N), ValueError),
            (torch.zeros(N, K, dtype=torch.int8), ValueError),
            (torch.zeros(N, K, requires_grad=True), ValueError),
            (0.0, TypeError),
        ):
            layer.weight.main_grad = bad
            with pytest.raises(error, match="main_grad"):
                layer(torch.randn(M, K))
        layer.weight.main_grad = torch.zeros(N, K)
        with pytest.raises(NotImplementedError, match="main_grad"):
            torch.func.grad(lambda x: layer(x).sum())(torch.randn(M, K))


class TestHolding(unittest.TestCase):
    @parameterized.expand(
        [
            (f"{name}_{backend or 'eager'}", CROSSED[name], backend)
            for name in ("INT8_DYNAMIC", "INT8_TRAINING", "MXFP8_TRAINING")
            for backend in (None, "aot_eager")
        ]
    )
    @pytest.mark.full
    def test_equal(self, _name, scheme, backend):
        torch.manual_seed(0)
        layer = hop.nn.Linear(K, N, scheme=scheme)
        call = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
        xs, results, held = torch.randn(3, M, K), [], []
        for holds in (False, True):
            layer.zero_grad()
            torch.manual_seed(1)
            ys = []
            with hop.nn.hold_weights(layer) if holds else torch.enable_grad():
                for x in xs:
                    ys.append(call(x))
                    held.append(layer._held[1])
                    ys[-1].square().sum().backward()
            results.append([*ys, layer.weight.grad, layer.bias.grad])
        assert all(map(same, *results))
        assert (
            held[:3] == [[]] * 3 and held[3] and all(a is b for h in held[4:] for a, b in zip(h, held[3], strict=True))
        )
        assert layer._held == (None, [])

    def test_another_scheme_inside(self):
        layer = hop.nn.Linear(K, N, scheme=CROSSED["INT8_DYNAMIC"])
        x = torch.randn(M, K)
        with hop.nn.scheme(CROSSED["MXFP8_TRAINING"]):
            want = layer(x)
        with hop.nn.hold_weights(layer):
            layer(x)
            with hop.nn.scheme(CROSSED["MXFP8_TRAINING"]):
                assert torch.equal(layer(x), want)

    def test_without_gradients_first(self):
        layer = hop.nn.Linear(K, N, scheme=CROSSED["MXFP8_TRAINING"])
        x = torch.randn(M, K)
        with hop.nn.hold_weights(layer):
            with torch.no_grad():
                layer(x)
            layer(x).sum().backward()
        assert layer.weight.grad is not None

    def test_weight_changed_inside(self):
        layer = hop.nn.Linear(K, N, scheme=CROSSED["INT8_DYNAMIC"])
        with pytest.raises(RuntimeError, match="changed inside"), hop.nn.hold_weights(torch.nn.Sequential(layer)):
            layer(torch.randn(M, K))
            with torch.no_grad():
                layer.weight.zero_()
        assert not layer.holds

    def test_not_nested(self):
        layer = hop.nn.Linear(K, N, scheme=CROSSED["INT8_DYNAMIC"])
        with hop.nn.hold_weights(layer):
            with pytest.raises(RuntimeError, match="do not nest"), hop.nn.hold_weights(layer):
                pass
            assert layer.holds


class TestErrors(unittest.TestCase):
    def test_shapes(self):
        layer = hop.nn.Linear(K, N, scheme=CROSSED["INT8_DYNAMIC"])
        for call in (layer, torch.compile(layer, backend="aot_eager")):
            with pytest.raises(Exception, match=r"last dimension of 'input' and the last of 'weight', which must"):
                call(torch.randn(M, K + 1))


def _compiled_cases(scheme: Scheme, first: int, count: int) -> list[Any]:
    """Every so many of the product of flags, bias and what is saved."""
    whole = list(itertools.product(FLAGS[1:], (False, True), (False, True)))
    whole = [case for case in whole if case[1] or not case[0][2]]
    return whole[first % (len(whole) // count) :: len(whole) // count]


class TestCompiled(unittest.TestCase):
    """An intermediate is the input. Each scheme has another part of the product."""

    def _check(self, scheme, cases, backend, exact):
        scales = scales_of(scheme)
        dtype = torch.bfloat16 if exact else torch.float32

        def inputs():
            return [operands(flags, bias, dtype, lead=(M,)) for flags, bias, _ in cases]

        def function(all_args, scales):
            found = []
            for (x, weight, bias), (_, _, save_original) in zip(all_args, cases, strict=True):
                options = Options(save_original)
                found.append(linear(scheme, x * 2, weight, bias, scales=scales, options=options)[0])
            return found

        results = []
        for call in (function, torch.compile(function, backend=backend, fullgraph=True)):
            torch._dynamo.reset()
            args = inputs()
            with torch._inductor.config.patch(fallback_random=True):
                torch.manual_seed(1)
                ys = call(args, scales)
                torch.manual_seed(2)
                torch.autograd.backward(ys, [torch.randn_like(y) for y in ys])
            results.append((ys, [t for own in args for t in own]))
        for eager, compiled in zip(*[r[0] for r in results], strict=True):
            assert described([eager]) == described([compiled]) and torch.equal(eager, compiled)
        for eager, compiled in zip(*[r[1] for r in results], strict=True):
            if eager is None or eager.grad is None:
                assert compiled is None or compiled.grad is None
                continue
            assert described([eager.grad]) == described([compiled.grad])
            if exact:
                assert torch.equal(eager.grad, compiled.grad)
            else:
                torch.testing.assert_close(eager.grad, compiled.grad, rtol=1e-4, atol=1e-3)

    @parameterized.expand([(name, s, i) for i, (name, s) in enumerate(ALL_SCHEMES)])
    @pytest.mark.full
    def test_aot_eager(self, _name, scheme, i):
        self._check(scheme, _compiled_cases(scheme, i, 8), "aot_eager", True)

    @parameterized.expand([(name, s, i) for i, (name, s) in enumerate(ALL_SCHEMES)])
    @pytest.mark.full
    @pytest.mark.compiler
    @pytest.mark.sampled(5)
    def test_inductor(self, _name, scheme, i):
        self._check(scheme, _compiled_cases(scheme, i, 4), "inductor", False)
