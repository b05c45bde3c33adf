"""Optimizers with quantized states: against torch.optim with float states, and against torchao's with theirs."""

import contextlib
import copy
import itertools
import sys
import unittest
from dataclasses import replace
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import hop
from hop import optim, presets
from hop.kernels.cpu import native
from hop.kernels.cpu import step as native_step
from hop.numerics.presets import STATE8, STATE8_UNSIGNED
from hop.optim import step
from tests import levels
from tests.support import matching
from tests.support.files import read_back
from tests.support.steps import drawn, give_gradients
from tests.support.tensors import plain

KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adam": (optim.Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "decoupled": (optim.Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adamw": (optim.AdamW, torch.optim.AdamW, {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6}),
    "amsgrad": (optim.AdamW, torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    "sgd": (optim.SGD, torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    "momentum": (optim.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.2}),
    "nesterov": (optim.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
}
QUANTIZED: dict[str, Any] = {
    "adamw8": lambda p, **k: optim.AdamW8bit(p, **k),
    "adamw4": lambda p, **k: optim.AdamW4bit(p, **k),
    "adamw_fp8": lambda p, **k: optim.AdamWFp8(p, **k),
    "amsgrad_mixed": lambda p, **k: optim.Adam(p, amsgrad=True, state=optim.BITS8_FP8, **k),
    "sgd": lambda p, **k: optim.SGD(p, momentum=0.9, **k),
    "lion": lambda p, **k: optim.Lion(p, **k),
}
SHAPES = ((64, 100), (8192,), (5,), (3, 7, 300))


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    return drawn(SHAPES, dtype, seed)


def run(optimizer: Any, params: Any, steps: range) -> None:
    for i in steps:
        give_gradients(params, i)
        optimizer.step()


class TestFloatStates(unittest.TestCase):
    @parameterized.expand(KINDS)
    def test_equals_torch(self, kind):
        ours, theirs, options = KINDS[kind]
        a, b = parameters(), parameters()
        run(ours(a, state=None, **options), a, range(6))
        run(theirs(b, foreach=False, **options), b, range(6))
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)

    def test_float64(self):
        a, b = parameters(torch.float64), parameters(torch.float64)
        run(optim.AdamW(a, state=None), a, range(4))
        run(torch.optim.AdamW(b, foreach=False), b, range(4))
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)
        run(optim.AdamW8bit(a), a, range(2))

    def test_lion_by_hand(self):
        a = parameters()
        want = [p.detach().double() for p in a]
        means = [torch.zeros_like(w) for w in want]
        optimizer = optim.Lion(a, lr=0.01, betas=(0.9, 0.98), weight_decay=0.1, state=None)
        for i in range(5):
            give_gradients(a, i)
            for k, p in enumerate(a):
                assert p.grad is not None
                g = p.grad.double()
                want[k] = want[k] - 0.01 * (torch.sign(0.9 * means[k] + 0.1 * g) + 0.1 * want[k])
                means[k] = 0.98 * means[k] + 0.02 * g
            optimizer.step()
        for p, w in zip(a, want, strict=True):
            torch.testing.assert_close(p.double(), w, rtol=1e-5, atol=1e-5)

    def test_a_learning_rate_that_is_a_tensor_or_scheduled(self):
        for options in ({"lr": torch.tensor(0.02)}, {"lr": 0.02}):
            a, b = parameters(), parameters()
            ours, theirs = optim.AdamW(a, state=None, **options), torch.optim.AdamW(b, lr=0.02, foreach=False)
            schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (ours, theirs)]
            for i in range(3):
                for params, o in ((a, ours), (b, theirs)):
                    give_gradients(params, i)
                    o.step()
                for s in schedules:
                    s.step()
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


class TestQuantizedStates(unittest.TestCase):
    def test_codes_are_those_of_the_update(self):
        """One step from known states: what is stored is the quantized update, computed in float64 here."""
        (p,) = params = [nn.Parameter(torch.randn(32, 256))]
        optimizer = optim.AdamW8bit(params, lr=1e-2, weight_decay=0.1)
        run(optimizer, params, range(3))
        state = optimizer.state[p]
        assert state["exp_avg"].quantizer == STATE8 and state["exp_avg_sq"].quantizer == STATE8_UNSIGNED
        before = p.detach().double()
        m, v = (hop.dequantize(state[k]).double() for k in ("exp_avg", "exp_avg_sq"))
        run(optimizer, params, range(3, 4))
        assert p.grad is not None
        g = p.grad.double()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        update = m / (1 - 0.9**4) / ((v / (1 - 0.999**4)).sqrt() + 1e-8)
        torch.testing.assert_close(p.double(), before * (1 - 1e-3) - 1e-2 * update, rtol=1e-5, atol=1e-6)
        for name, number in (("exp_avg", m), ("exp_avg_sq", v)):
            q = optim.BITS8[name]
            assert q is not None
            want = hop.quantize(q, number.float())
            differ = (want.codes != state[name].codes).float().mean()
            assert differ < 1e-3  # rounding of float32
            torch.testing.assert_close(want.scale, state[name].scale, rtol=1e-6, atol=0.0)

    @parameterized.expand(
        [
            (name, q)
            for name, q in presets.PRESETS.items()
            if name.startswith("STATE") and q not in (STATE8, presets.STATE4)
        ]
    )
    def test_means_of_squares_stay_above_zero(self, _name, unsigned):
        """Where they would be rounded to 0, and the gradient is 0 from then on, steps stay below ten learning rates."""
        largest = []
        for state in (None, {"exp_avg": STATE8, "exp_avg_sq": unsigned}):
            (p,) = params = [nn.Parameter(torch.zeros(8192))]
            optimizer = optim.AdamW(params, lr=1.0, weight_decay=0.0, state=state)
            moved = [torch.zeros(())]
            for i in range(12):
                p.grad = torch.zeros_like(p)
                p.grad[::256] = 1.0
                p.grad[1:8000:2] = 1e-4 * (i == 0)
                before = p.detach().clone()
                optimizer.step()
                moved.append((p.detach() - before).abs().max())
            largest.append(max(moved))
        square = plain(optimizer.state[p]["exp_avg_sq"])
        assert (square[1:8000:2] > 0).all() and (square[8001::2] == 0).all() == (0 in unsigned.format.numbers)
        assert largest[0] < 3 and largest[1] < 10

    def test_small_parameters_stay_floats(self):
        params = parameters()
        optimizer = optim.AdamW8bit(params, min_numel=6000)
        run(optimizer, params, range(1))
        kinds = [type(optimizer.state[p]["exp_avg"]) is hop.QuantizedTensor for p in params]
        assert kinds == [True, True, False, True]
        optimizer = optim.AdamW([{"params": params[:2]}, {"params": params[2:], "state": None}])
        run(optimizer, params, range(1))
        kinds = [type(optimizer.state[p]["exp_avg"]) is hop.QuantizedTensor for p in params]
        assert kinds == [True, True, False, False]

    @parameterized.expand(QUANTIZED)
    def test_bytes(self, kind):
        params = [nn.Parameter(torch.randn(1024, 1024))]
        optimizer = QUANTIZED[kind](params)
        run(optimizer, params, range(1))
        held = [x for x in optimizer.state[params[0]].values() if isinstance(x, hop.QuantizedTensor)]
        size = sum(b.numel() * b.element_size() for x in held for b in x.buffers().values()) / params[0].numel()
        assert size <= {"adamw4": 1.07, "sgd": 1.02, "lion": 1.02, "amsgrad_mixed": 3.06}.get(kind, 2.04)

    @parameterized.expand([(f"{k}_{d}", k, d) for k in QUANTIZED for d in (torch.float32, torch.bfloat16)])
    @pytest.mark.quick(3)
    def test_saved_and_loaded(self, _name, kind, dtype):
        """A copy goes on as the original, and shares nothing with it; also after a file, and as a deep copy."""
        params = parameters(dtype)
        optimizer = QUANTIZED[kind](params)
        run(optimizer, params, range(3))
        read = read_back(optimizer.state_dict(), weights_only=True)
        for saved in (
            optimizer.state_dict(),
            read,
            copy.deepcopy(optimizer.state_dict()),
        ):
            others = copy.deepcopy(params)
            other = QUANTIZED[kind](others)
            other.load_state_dict(saved)
            mine = copy.deepcopy(optimizer.state_dict())
            run(other, others, range(3, 5))
            for k, state in optimizer.state_dict()["state"].items():
                for name, x in state.items():
                    assert x.dtype == (torch.float32 if name == "step" else dtype)
                    assert torch.equal(plain(x), plain(mine["state"][k][name]))
        again, copied = copy.deepcopy((params, optimizer))
        run(optimizer, params, range(3, 5))
        run(copied, again, range(3, 5))
        for a, b, c in zip(params, others, again, strict=True):
            assert torch.equal(a, b) and torch.equal(a, c)

    def test_from_torch_and_back(self):
        """States of torch.optim.AdamW, and of another format, become those of this optimizer."""
        params = parameters()
        theirs = torch.optim.AdamW(params, lr=0.01)
        run(theirs, params, range(3))
        ours = optim.AdamW8bit(params)
        ours.load_state_dict(theirs.state_dict())
        assert ours.param_groups[0]["lr"] == 0.01
        assert "fused" in theirs.param_groups[0]  # by which, and others of torch's, checkpoints would differ
        assert set(ours.param_groups[0]) == set(optim.AdamW8bit(params).param_groups[0])
        for p in params:
            x = ours.state[p]["exp_avg"]
            assert type(x) is (hop.QuantizedTensor if p.numel() >= 4096 else Tensor)
            torch.testing.assert_close(plain(x), theirs.state[p]["exp_avg"], rtol=0.1, atol=0.01)
        floats = optim.AdamW(params, state=None)
        floats.load_state_dict(ours.state_dict())
        assert all(type(floats.state[p]["exp_avg"]) is Tensor for p in params)
        assert torch.equal(floats.state[params[0]]["exp_avg"], plain(ours.state[params[0]]["exp_avg"]))
        run(floats, params, range(3, 4))

    def test_states_of_others_are_refused(self):
        """By the name of the state, what was found and what is expected, before anything has changed."""
        params = parameters()
        optimizer = optim.AdamW8bit(params, lr=0.01)
        run(optimizer, params, range(2))
        shape = params[0].shape
        saved = optimizer.state_dict()

        def changed(**states: Any) -> Any:
            new = {key: x for key, x in {**saved["state"][0], **states}.items() if x is not ...}
            return {"param_groups": saved["param_groups"], "state": {**saved["state"], 0: new}}

        codes = torch.zeros(shape, dtype=torch.uint8)
        foreign = {"state1": codes, "state2": codes, "exp_avg": ..., "exp_avg_sq": ...}
        groups = {}
        for name, other in (("lion", optim.Lion), ("sgd", torch.optim.SGD), ("adam4", optim.AdamW4bit)):
            others = copy.deepcopy(params)
            with_momentum = {"momentum": 0.9} if name == "sgd" else {}
            groups[name] = other(others, lr=0.1, **with_momentum)
            run(groups[name], others, range(2))
        cases = [
            (
                ValueError,
                "parameter 0 has the state 'state1'; its states must be 'exp_avg', 'exp_avg_sq'",
                changed(**foreign),
            ),
            (ValueError, "parameter 0 has no state 'exp_avg_sq'", changed(exp_avg_sq=...)),
            (ValueError, r"parameter 0: exp_avg must be a float tensor .* got torch.uint8", changed(exp_avg=codes)),
            (ValueError, r"parameter 0: exp_avg must be .* of shape \(3,\)", changed(exp_avg=torch.ones(3))),
            (TypeError, "parameter 0: exp_avg must be a tensor", changed(exp_avg=[1.0])),
            (ValueError, "parameter 0: step must be a number", changed(step="two")),
            (ValueError, "param group 0 has no 'eps'", groups["lion"].state_dict()),
            (ValueError, "param group 0 has no 'betas'", groups["sgd"].state_dict()),
            (ValueError, r"exp_avg is quantized by .*dynamic4.* requantize=True", groups["adam4"].state_dict()),
        ]
        before = copy.deepcopy(saved)
        for error, words, state in cases:
            with pytest.raises(error, match=words):
                optimizer.load_state_dict(state)
            assert optimizer.param_groups[0]["lr"] == 0.01
            now = optimizer.state_dict()["state"]
            for i, states in before["state"].items():
                assert all(torch.equal(plain(x), plain(now[i][name])) for name, x in states.items())

    def test_requantized(self):
        """States of other quantizers are quantized anew where that is asked for."""
        params = parameters()
        theirs, ours = optim.AdamW8bit(params), optim.AdamW4bit(copy.deepcopy(params))
        run(theirs, params, range(2))
        ours.load_state_dict(theirs.state_dict(), requantize=True)
        for p, q in zip(params, ours.param_groups[0]["params"], strict=True):
            x, y = theirs.state[p]["exp_avg"], ours.state[q]["exp_avg"]
            if isinstance(y, hop.QuantizedTensor):
                assert torch.equal(plain(y), plain(hop.quantize(y.quantizer, plain(x))))

    def test_from_torch_sgd(self):
        """It counts no steps, and has no buffer without momentum: either goes on as it would."""
        for options in ({"momentum": 0.9}, {"momentum": 0.0}):
            params = parameters()
            theirs = torch.optim.SGD(params, lr=0.01, foreach=False, **options)
            run(theirs, params, range(2))
            others = copy.deepcopy(params)
            ours = optim.SGD(others, state=None, **options)
            ours.load_state_dict(theirs.state_dict())
            run(theirs, params, range(2, 4))
            run(ours, others, range(2, 4))
            for a, b in zip(params, others, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    def test_parameters_without_gradients_and_new_groups(self):
        params = parameters()
        optimizer = optim.AdamW8bit(params[:2])
        give_gradients(params, 0)
        params[0].grad = None
        before = params[0].detach().clone()
        optimizer.step()
        assert torch.equal(params[0], before) and params[0] not in optimizer.state
        optimizer.add_param_group({"params": params[2:], "lr": 0.5})
        optimizer.zero_grad(set_to_none=True)
        optimizer.step()
        run(optimizer, params, range(1, 3))
        assert set(optimizer.state) == set(params)

    def test_closure(self):
        params = parameters()
        optimizer = optim.AdamW8bit(params)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = torch.stack([p.square().sum() for p in params]).sum()
            loss.backward()
            return loss

        first = optimizer.step(closure)
        assert optimizer.step(closure) < first


STEPS: dict[str, Any] = {
    **QUANTIZED,
    "coupled": lambda p, **k: optim.Adam(p, amsgrad=True, weight_decay=0.1, maximize=True, state=optim.BITS8_FP8, **k),
    "nesterov": lambda p, **k: optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=0.1, state=optim.FP8, **k),
    "plain": lambda p, **k: optim.SGD(p, weight_decay=0.1, **k),
    "floats": lambda p, **k: optim.AdamW(p, state=None, **k),
    "rounded": lambda p, **k: optim.Lion(p, weight_decay=0.1, stochastic_rounding=True, seed=5, **k),
    "small blocks": lambda p, **k: optim.AdamW(p, state=replace(STATE8, block=(16,)), **k),
    "odd blocks": lambda p, **k: optim.AdamW(p, state=replace(STATE8, block=(100,)), **k),  # not taken by the kernel
    "rows": lambda p, **k: optim.AdamW(p, state=presets.INT8_ROW, **k),  # nor are these
}


def bits(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All that a step changes, as integers; one for all NaN, whose sign and payload mean nothing."""
    found = []
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        for x in (p.detach(), *optimizer.state[p].values()):
            held = x.buffers().values() if isinstance(x, hop.QuantizedTensor) else (x,)
            for b in held:
                wide = b.to(torch.float32)
                found.append(torch.where(wide.isnan(), torch.nan, wide).view(torch.int32))
    return found


def nasty(p: Tensor, step: int) -> Tensor:
    """Gradients of many sizes, with zeros, subnormal numbers, and what overflows when it is squared."""
    g = torch.Generator().manual_seed(step)
    x = torch.randn(p.shape, generator=g) * 10.0 ** torch.randint(
        -12, 8, (p.shape[0],) + (1,) * (p.dim() - 1), generator=g
    )
    x = torch.where(torch.rand(p.shape, generator=g) < 0.2, 0.0, x)
    return torch.where(torch.rand(p.shape, generator=g) < 0.001, 1e-40 if step % 2 else 3e19, x).to(p.dtype)


class TestNative(unittest.TestCase):
    """The kernel against the reference, bit for bit."""

    @parameterized.expand([(f"{k}_{d}", k, d) for k in STEPS for d in (torch.float32, torch.bfloat16, torch.float16)])
    @pytest.mark.quick(5)
    def test_equals_reference(self, _name, kind, dtype):
        shapes = (*SHAPES, (5000, 3), (1,), (2, 4096))
        g = torch.Generator().manual_seed(0)
        start = [torch.randn(shape, generator=g).to(dtype) for shape in shapes]
        runs = {}
        for level in ("off", *levels.OWN_HERE):
            params = [nn.Parameter(x.clone()) for x in start]
            optimizer = STEPS[kind](params, min_numel=1000)
            with native.use(level):
                for step in range(3):
                    for p in params:
                        p.grad = nasty(p, step)
                    optimizer.step()
            runs[level] = bits(optimizer)
        for level in levels.OWN_HERE:
            assert all(torch.equal(x, y) for x, y in zip(runs[level], runs["off"], strict=True)), level

    def test_takes_what_it_says(self):
        def reason(p: Tensor, quantizer: str, *buffers: Tensor) -> str:
            return matching.reason(native_step.STEP, ("adam", (), None, 0, p, p, [quantizer], buffers, [0.0]))

        x = torch.zeros(64, 32)
        made = hop.quantize(STATE8, x)
        assert not reason(x, "", x) and not reason(x, str(STATE8), made.codes, made.scale)
        assert "not torch.float64" in reason(x.double(), "", x)
        assert "not of 100" in reason(x, str(replace(STATE8, block=(100,))), made.codes, made.scale)
        assert "for flat blocks" in reason(x, str(presets.INT8_ROW), made.codes, made.scale)
        with native.use("off"):
            assert "switched off" in reason(x, "", x)

    def test_layouts(self):
        """Parameters, gradients and states that do not lie row by row."""
        results = []
        for level in ("off", levels.BEST):
            g = torch.Generator().manual_seed(0)
            params = [nn.Parameter(torch.randn(16, 8, 8, 8, generator=g).to(memory_format=torch.channels_last))]
            params.append(nn.Parameter(torch.randn(128, 64, generator=g).T))
            for state in (None, optim.BITS8, optim.BITS4):
                optimizer = optim.AdamW(params, state=state)
                with native.use(level):
                    for _ in range(2):
                        for p in params:
                            p.grad = torch.randn(p.shape, generator=g)
                        optimizer.step()
            results.append(params)
        for x, y in zip(*results, strict=True):
            assert torch.equal(x, y) and x.stride() == y.stride()

    def test_autograd_sees_the_change(self):
        p = nn.Parameter(torch.ones(4))
        optimizer = optim.SGD([p], lr=0.1)
        loss = (p * p).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class TestFused(unittest.TestCase):
    @pytest.mark.full
    def test_equals_reference(self):
        """The step as Inductor compiles it for GPUs: one program for all shapes, rounded as the reference."""
        g = torch.Generator().manual_seed(0)
        q, numbers = optim.FP8["exp_avg"], torch.tensor([0.1, 0.9, 1.0, 0.01, 0.0])
        for i, shape in enumerate(((64, 100), (3, 7, 300))):
            p, grad, m = (torch.randn(shape, generator=g) for _ in range(3))
            held = hop.quantize(q, m).buffers().values()
            results = []
            for write in (step.write_updated, step.write_fused):
                own, buffers = p.to(torch.bfloat16), [b.clone() for b in held]
                with native.use("off"):
                    write("sgd coupled", numbers, torch.tensor(7), i, own, grad, [str(q)], buffers)
                results.append([own, *(b.float() for b in buffers)])
            assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
            assert not torch.equal(results[0][0], p.to(torch.bfloat16))


class TestCompiled(unittest.TestCase):
    @parameterized.expand(QUANTIZED)
    @pytest.mark.full
    def test_whole_step(self, kind):
        """One graph, which does what eager mode does."""
        a, b = parameters()[:2], parameters()[:2]
        ours, other = QUANTIZED[kind](a), QUANTIZED[kind](b)
        step = torch.compile(lambda: other.step(), fullgraph=True, backend="aot_eager")
        for i in range(3):
            for params in (a, b):
                give_gradients(params, i)
            ours.step()
            step()
        assert all(torch.equal(x, y) for x, y in zip(bits(ours), bits(other), strict=True))

    @pytest.mark.full
    def test_learning_rates(self):
        """By Inductor: floats, with a second program when they first change; and a tensor, with one for all."""
        for lr in (0.01, torch.tensor(0.01)):
            a, b = parameters(torch.bfloat16), parameters(torch.bfloat16)
            ours, other = optim.AdamW8bit(a, lr=lr), optim.AdamW8bit(b, lr=lr)
            counted = CompileCounterWithBackend("inductor")
            step = torch.compile(lambda o=other: o.step(), fullgraph=True, backend=counted)
            for i in range(4):
                for params, o in ((a, ours), (b, other)):
                    give_gradients(params, i)
                    if isinstance(lr, Tensor):
                        lr.fill_(0.5**i)
                    else:
                        o.param_groups[0]["lr"] = 0.5**i
                ours.step()
                step()
            assert all(torch.equal(x, y) for x, y in zip(bits(ours), bits(other), strict=True))
            assert counted.frame_count == (1 if isinstance(lr, Tensor) else 2)

    @parameterized.expand([("adamw8",), ("sgd",), ("lion",)])
    @pytest.mark.quick(3)
    def test_options_that_change(self, kind):
        """Floats and tensors are inputs of a program, which does what eager mode does."""
        make: Any = {"adamw8": optim.AdamW8bit, "sgd": optim.SGD, "lion": optim.Lion}[kind]
        names = {"adamw8": ("lr", "eps", "weight_decay"), "lion": ("lr", "weight_decay")}.get(
            kind, ("lr", "momentum", "dampening", "weight_decay")
        )
        for of in (float, torch.tensor):
            given = {name: of(0.1) for name in names} | ({} if kind == "sgd" else {"betas": (of(0.8), of(0.9))})
            a, b = parameters()[:2], parameters()[:2]
            ours, other = make(a, **copy.deepcopy(given)), make(b, **copy.deepcopy(given))
            counted = CompileCounterWithBackend("aot_eager")
            step = torch.compile(lambda o=other: o.step(), fullgraph=True, backend=counted)
            for i in range(4):
                for params, o in ((a, ours), (b, other)):
                    give_gradients(params, i)
                    group = o.param_groups[0]
                    for name in names:
                        group[name] = of(0.1 / (i + 1))
                    if kind != "sgd":
                        group["betas"] = (of(0.8 + 0.01 * i), of(0.9))
                ours.step()
                step()
            assert all(torch.equal(x, y) for x, y in zip(bits(ours), bits(other), strict=True))
            assert counted.frame_count == (2 if of is float else 1)

    @parameterized.expand(itertools.product(("adamw8", "sgd", "lion"), (False, True)))
    @pytest.mark.compiler
    @pytest.mark.quick(6)
    def test_cycles(self, kind, of_tensors):
        """OneCycleLR changes the learning rate and the first beta or the momentum in each step: two programs in all."""
        of = torch.tensor if of_tensors else float
        betas, decay = {"betas": (of(0.9), of(0.99))}, {"weight_decay": of(0.01)}
        make: Any = {"adamw8": optim.AdamW8bit, "sgd": optim.SGD, "lion": optim.Lion}[kind]
        options = {"adamw8": betas | decay | {"eps": of(1e-8)}, "lion": betas | decay}.get(
            kind, decay | {"momentum": of(0.9), "dampening": of(0.0)}
        )
        a, b = parameters()[:2], parameters()[:2]
        ours, other = (make(params, lr=of(1e-3), **copy.deepcopy(options)) for params in (a, b))
        schedules = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=30) for o in (ours, other)]
        counted = CompileCounterWithBackend("eager")
        step = torch.compile(other.step, backend=counted)  # the schedule's wrapper of step is not traced
        for i in range(6):
            for params in (a, b):
                give_gradients(params, i)
            ours.step()
            step()
            for schedule in schedules:
                schedule.step()
        assert all(torch.equal(x, y) for x, y in zip(bits(ours), bits(other), strict=True))
        assert counted.frame_count == 2

    def test_tensors_are_read_in_float64(self):
        """As the floats that they hold."""
        a, b = parameters()[:2], parameters()[:2]
        options = {"lr": 0.01, "eps": 1e-6, "weight_decay": 0.1}
        tensors = {name: torch.tensor(x, dtype=torch.float64) for name, x in options.items()}
        betas = tuple(torch.tensor(x, dtype=torch.float64) for x in (0.8, 0.95))
        ours, other = optim.AdamW8bit(a, betas=(0.8, 0.95), **options), optim.AdamW8bit(b, betas=betas, **tensors)
        for optimizer, params in ((ours, a), (other, b)):
            run(optimizer, params, range(3))
        assert all(torch.equal(x, y) for x, y in zip(bits(ours), bits(other), strict=True))


class TestStochasticRounding(unittest.TestCase):
    def test_is_unbiased_and_reproducible(self):
        """Updates of a twentieth of a unit: to the nearest all are lost, stochastically their sum is right."""

        def moved(**options: Any) -> Tensor:
            (p,) = params = [nn.Parameter(torch.ones(1 << 16, dtype=torch.bfloat16))]
            optimizer = optim.SGD(params, lr=2.0**-8 / 20, state=None, **options)
            for _ in range(20):
                p.grad = torch.ones_like(p)
                optimizer.step()
            return p.detach().float() - 1

        assert not moved().any()
        found = moved(stochastic_rounding=True, seed=3)
        wanted = -(2.0**-8)
        assert abs(found.mean() - wanted) < 5 * found.std() / 256 and found.unique().numel() > 3
        assert torch.equal(found, moved(stochastic_rounding=True, seed=3))
        assert not torch.equal(found, moved(stochastic_rounding=True, seed=4))

    def test_what_is_no_number_stays(self):
        from hop.optim.step import rounded

        largest = torch.finfo(torch.bfloat16).max
        x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, largest])
        y = rounded(x, torch.tensor(1), 0).float()
        assert torch.equal(y.nan_to_num(7.0), x.nan_to_num(7.0)) and torch.signbit(y[4])


class TestErrors(unittest.TestCase):
    @parameterized.expand([("eager", False), ("compiled", True)])
    @pytest.mark.quick(2)
    def test_nonfinite(self, _name, compiled):
        params = parameters()
        optimizer = optim.AdamW8bit(params, error_if_nonfinite=True)
        run(optimizer, params, range(2))
        step = (
            torch.compile(lambda: optimizer.step(), fullgraph=True, backend="aot_eager") if compiled else optimizer.step
        )
        before = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict()["state"])
        give_gradients(params, 2)
        assert params[3].grad is not None
        params[3].grad[0, 0, 0] = float("inf")
        with pytest.raises(FloatingPointError, match="AdamW8bit: the gradient of parameter 3 of group 0"):
            step()
        assert all(torch.equal(a, b) for a, b in zip(params, before[0], strict=True))
        for k, state in optimizer.state_dict()["state"].items():
            assert all(torch.equal(plain(x), plain(before[1][k][name])) for name, x in state.items())

    @parameterized.expand([("8", optim.AdamW8bit), ("4", optim.AdamW4bit), ("fp8", optim.AdamWFp8)])
    def test_what_is_no_number(self, _name, make):
        """It makes a NaN of the parameter, which one sees; of the states of others in its block none."""
        for bad in (float("nan"), float("inf")):
            (p,) = params = [nn.Parameter(torch.ones(2, 4096))]
            optimizer = make(params)
            for i in range(3):
                p.grad = torch.full_like(p, 0.01)
                if i == 1:
                    p.grad[0, 5] = bad
                optimizer.step()
            others = torch.arange(p.numel()).view(p.shape) != 5
            assert p[0, 5].isnan() and p[others].isfinite().all()
            for name in ("exp_avg", "exp_avg_sq"):
                x = plain(optimizer.state[p][name])
                assert x[others].isfinite().all() and (x[1] > 0).all()
                if bad != bad:
                    assert (x[others] > 0).all()

    def test_arguments(self):
        params = parameters()
        for error, text, options in (
            (ValueError, r"AdamW: lr must be at least 0 and finite, got -1", {"lr": -1}),
            (ValueError, r"AdamW: betas\[1\] must be at least 0 and below 1, got 1.0", {"betas": (0.9, 1.0)}),
            (
                ValueError,
                r"AdamW: betas\[0\] must be at least 0 and below 1, got 2.0",
                {"betas": (torch.tensor(2.0), 0)},
            ),
            (ValueError, r"AdamW: betas\[0\] must be a number or .* got shape \(2,\)", {"betas": (torch.ones(2), 0)}),
            (ValueError, "AdamW: lr must be at least 0 and finite, got -1.0", {"lr": torch.tensor(-1.0)}),
            (ValueError, r"AdamW: the keys of state must be names of states, got 'exp'", {"state": {"exp": STATE8}}),
            (TypeError, r"AdamW: state must be a Quantizer, a mapping", {"state": 8}),
            (TypeError, r"AdamW: state\['exp_avg'\] must be a Quantizer or None", {"state": {"exp_avg": 8}}),
            (ValueError, r"AdamW: min_numel must be an integer of at least 0, got -1", {"min_numel": -1}),
        ):
            with pytest.raises(error, match=text):
                optim.AdamW(params, **options)
        with pytest.raises(ValueError, match="AdamW: differentiable must be False"):
            optim.AdamW(params, differentiable=True, foreach=True, fused=None, capturable=True)
        with pytest.raises(ValueError, match="SGD: nesterov needs a momentum above 0"):
            optim.SGD(params, nesterov=True)
        with pytest.raises(TypeError, match=r"parameters must be floating point, got one of torch\.int64"):
            optim.AdamW([torch.zeros(3, dtype=torch.int64)])


class TestInterrupted(unittest.TestCase):
    """Ctrl-C at each call of an operator in a step, and at each line of the code that makes states: the optimizer goes
    on from the state that it was left in, as one that is made with that state does."""

    def after(self, make, interrupt):
        """The parameters and the optimizer after an interrupted step; None where it ended before."""
        torch.manual_seed(7)
        params = [torch.nn.Parameter(torch.randn(8, 512)) for _ in range(2)]
        optimizer = make(params)
        for p in params:
            p.grad = torch.randn_like(p)
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            optimizer.step()
            return None
        return params, optimizer

    def check(self, make, interrupts):
        points = 0
        for interrupt in interrupts:
            found = self.after(make, interrupt)
            if found is None:
                break
            points += 1
            params, optimizer = found
            for p in params:
                state = optimizer.state.get(p)
                assert not state or {"step", *optimizer._names(optimizer.param_groups[0])} == set(state)
            copied = [torch.nn.Parameter(p.detach().clone()) for p in params]
            other = make(copied)
            if all(optimizer.state.get(p) for p in params):
                other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            else:
                assert not any(optimizer.state[p]["step"] for p in params if optimizer.state.get(p))
            for mine, its in zip(params, copied, strict=True):
                its.grad = mine.grad.clone()
            optimizer.step()
            other.step()
            assert all(torch.equal(a, b) for a, b in zip(params, copied, strict=True))
        return points

    @parameterized.expand(
        [
            ("adamw8", optim.AdamW, {}),
            ("adamw4", optim.AdamW, {"state": optim.BITS4}),
            ("sgd", optim.SGD, {"momentum": 0.9}),
        ]
    )
    @pytest.mark.full
    def test_at_each_operator(self, _name, cls, options):
        assert self.check(lambda params: cls(params, **options), map(StopsAtOperator, range(10_000))) > 3

    @parameterized.expand([("adamw", optim.AdamW), ("lion", optim.Lion)])
    def test_at_each_line_that_makes_states(self, _name, cls):
        assert self.check(lambda params: cls(params, min_numel=0), map(StopsAtLine, range(10_000))) > 8


class StopsAtOperator(TorchDispatchMode):
    """Raises at the n-th operator."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.left = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


class StopsAtLine(contextlib.AbstractContextManager[None]):
    """Raises at the n-th line of Optimizer._init_group, before it runs."""

    def __init__(self, count: int) -> None:
        self.left = count

    def trace(self, frame, event, _):
        code = frame.f_code
        own = code.co_filename.endswith("optimizer.py") and (
            code.co_name == "_init_group" or (frame.f_back is not None and frame.f_back.f_code.co_name == "_init_group")
        )
        if not own:
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        return self.trace

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)

    def __exit__(self, *_):
        sys.settrace(self.before)


class TestExplain(unittest.TestCase):
    def test_names_the_kernel_and_why_others_declined(self):
        params = [*drawn(((64, 100), (8192,)), torch.bfloat16), *drawn(((3,),), torch.float64), *drawn(((2,),))]
        optimizer = optim.AdamW8bit(params)
        assert optimizer.explain() == ""
        give_gradients(params[:3], 0)
        optimizer.step()
        with native.use("off"):
            said = optimizer.explain()
        assert said.startswith("parameters 0.0, 0.1, 0.2\ngpu: for parameters on a GPU, not on cpu\nnative: ")
        assert said.endswith("\naten: runs it")
        if native.declines_here() is None:
            first, second = optimizer.explain().split("\nparameters ")
            assert first.startswith("parameters 0.0, 0.1\n") and first.endswith("\nnative: runs it")
            assert second.startswith("0.2\n") and "not torch.float64\naten: runs it" in second
