"""Optimizers with quantized states: against torch.optim with float states, and against torchao's with theirs."""

import copy
import io
import unittest
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import optim
from hop.presets import STATE8, STATE8_UNSIGNED

KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adam": (optim.Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
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
    g = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in SHAPES]


def give_gradients(params: Any, step: int) -> None:
    g = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g).to(p.dtype)


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
    def test_saved_and_loaded(self, _name, kind, dtype):
        """A copy goes on as the original, and shares nothing with it; also after a file, and as a deep copy."""
        params = parameters(dtype)
        optimizer = QUANTIZED[kind](params)
        run(optimizer, params, range(3))
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        for saved in (
            optimizer.state_dict(),
            torch.load(file, weights_only=True),
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
                    assert torch.equal(_numbers(x), _numbers(mine["state"][k][name]))
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
        for p in params:
            x = ours.state[p]["exp_avg"]
            assert type(x) is (hop.QuantizedTensor if p.numel() >= 4096 else Tensor)
            torch.testing.assert_close(_numbers(x), theirs.state[p]["exp_avg"], rtol=0.1, atol=0.01)
        floats = optim.AdamW(params, state=None)
        floats.load_state_dict(ours.state_dict())
        assert all(type(floats.state[p]["exp_avg"]) is Tensor for p in params)
        assert torch.equal(floats.state[params[0]]["exp_avg"], _numbers(ours.state[params[0]]["exp_avg"]))
        run(floats, params, range(3, 4))

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


class TestCompiled(unittest.TestCase):
    @parameterized.expand(QUANTIZED)
    @pytest.mark.full
    def test_whole_step(self, kind):
        """One graph, whose parameters are those of eager mode but for the rounding of float32."""
        a, b = parameters()[:2], parameters()[:2]
        ours, other = QUANTIZED[kind](a), QUANTIZED[kind](b)
        step = torch.compile(lambda: other.step(), fullgraph=True, backend="aot_eager")
        for i in range(3):
            for params in (a, b):
                give_gradients(params, i)
            ours.step()
            step()
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


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
        from hop.optim.rounding import rounded

        largest = torch.finfo(torch.bfloat16).max
        x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, largest])
        y = rounded(x, torch.tensor(1), 0).float()
        assert torch.equal(y.nan_to_num(7.0), x.nan_to_num(7.0)) and torch.signbit(y[4])


class TestErrors(unittest.TestCase):
    def test_nonfinite(self):
        params = parameters()
        optimizer = optim.AdamW8bit(params, error_if_nonfinite=True)
        run(optimizer, params, range(2))
        before = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict()["state"])
        give_gradients(params, 2)
        assert params[3].grad is not None
        params[3].grad[0, 0, 0] = float("inf")
        with pytest.raises(FloatingPointError, match="AdamW8bit: the gradient of parameter 3 of group 0"):
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(params, before[0], strict=True))
        for k, state in optimizer.state_dict()["state"].items():
            assert all(torch.equal(_numbers(x), _numbers(before[1][k][name])) for name, x in state.items())

    def test_arguments(self):
        params = parameters()
        for error, text, options in (
            (ValueError, r"AdamW: lr must be at least 0, got -1", {"lr": -1}),
            (ValueError, r"AdamW: betas\[1\] must be at least 0 and below 1, got 1.0", {"betas": (0.9, 1.0)}),
            (ValueError, r"AdamW: state has the key 'exp'; the names of states are", {"state": {"exp": STATE8}}),
            (TypeError, r"AdamW: state must be a hop.Quantizer, a mapping", {"state": 8}),
            (TypeError, r"AdamW: state\['exp_avg'\] must be a hop.Quantizer or None", {"state": {"exp_avg": 8}}),
            (ValueError, r"AdamW: min_numel must be an integer of at least 0, got -1", {"min_numel": -1}),
        ):
            with pytest.raises(error, match=text):
                optim.AdamW(params, **options)
        with pytest.raises(ValueError, match="SGD: nesterov needs a momentum above 0"):
            optim.SGD(params, nesterov=True)
        with pytest.raises(TypeError, match=r"parameters must be floating point, got one of torch\.int64"):
            optim.AdamW([torch.zeros(3, dtype=torch.int64)])


def _numbers(x: Tensor) -> Tensor:
    return hop.dequantize(x) if isinstance(x, hop.QuantizedTensor) else x
