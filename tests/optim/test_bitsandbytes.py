"""States of bitsandbytes' optimizers go on in ours, with the same codes and scales, and back."""

import copy
import dataclasses
import unittest
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import optim
from hop.numerics.presets import STATE8, STATE8_UNSIGNED
from tests.support.files import read_back
from tests.support.steps import drawn, give_gradients

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
F = bnb.functional

SHAPES = ((32, 256), (4, 3, 513), (7,))
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adamw": (bnb.optim.AdamW8bit, optim.AdamW8bit, {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6}),
    "adam": (bnb.optim.Adam8bit, optim.Adam, {"lr": 1e-2, "betas": (0.8, 0.95)}),
    "lion": (bnb.optim.Lion8bit, optim.Lion, {"lr": 1e-3, "weight_decay": 0.1}),
    "sgd": (bnb.optim.SGD8bit, optim.SGD, {"lr": 1e-2, "momentum": 0.8, "weight_decay": 0.1}),
}


def stepped(optimizer: Any, params: Any, steps: range) -> Any:
    for i in steps:
        give_gradients(params, i)
        optimizer.step()
    return optimizer


def state_names(optimizer: Any) -> list[str]:
    return list(optimizer._names(optimizer.param_groups[0]))


def check_equal_states(theirs: dict[str, Any], ours: Any, names: list[str]) -> None:
    """Compare the codes and scales of one parameter, and values with bitsandbytes' own dequantization."""
    for i, name in enumerate(names, 1):
        codes, y = theirs[f"state{i}"], ours[name]
        if codes.dtype == torch.float32:
            assert torch.equal(codes, y)
            continue
        book, absmax = theirs[f"qmap{i}"], theirs[f"absmax{i}"]
        assert y.quantizer == (STATE8_UNSIGNED if i == 2 else STATE8)
        assert torch.equal(codes, y.codes) and torch.equal(absmax, y.scale.reshape(-1))
        values = F.dequantize_blockwise(codes, absmax=absmax, code=book, blocksize=256)
        assert torch.equal(values, hop.dequantize(y, torch.float32))


class TestBitsandbytes(unittest.TestCase):
    @parameterized.expand([(kind, nested) for kind in KINDS for nested in (True, False)])
    def test_goes_on(self, kind: str, nested: bool):
        """The file of a state, with its tensors nested or, as older versions wrote them, not."""
        one, other, options = KINDS[kind]
        params = drawn(SHAPES)
        first = stepped(one(params, **options), params, range(3))
        saved = read_back(first.state_dict(), weights_only=True)
        if not nested:
            saved["state"] = {
                n: {"step": s["step"], **s["__bnb_optimizer_quant_state__"]} for n, s in saved["state"].items()
            }
        mine = [nn.Parameter(p.detach().clone()) for p in params]
        ours = other(mine, lr=1.0)
        optim.load_bitsandbytes_state(ours, saved)
        group = ours.param_groups[0]
        assert all(group[key] == value for key, value in options.items())
        for p, q in zip(params, mine, strict=True):
            assert ours.state[q]["step"] == 3
            check_equal_states(first.state[p], ours.state[q], state_names(ours))
        stepped(first, params, range(3, 4))
        stepped(ours, mine, range(3, 4))
        for p, q in zip(params, mine, strict=True):
            # hop stores positive means of squares as at least the least code, and theirs may become 0
            apart = (p - q).abs() > 1e-6 + 1e-5 * q.abs()
            assert apart.float().mean() < 1e-3, apart.sum()

    @parameterized.expand(KINDS)
    def test_back(self, kind: str):
        one, other, options = KINDS[kind]
        params = drawn(SHAPES)
        ours = stepped(other(params, **options), params, range(2))
        saved = read_back(optim.bitsandbytes_state(ours), weights_only=True)
        mine = [nn.Parameter(p.detach().clone()) for p in params]
        theirs = one(mine, **{**options, "lr": 1.0})
        theirs.load_state_dict(saved)
        assert theirs.param_groups[0]["lr"] == options["lr"]
        for p, q in zip(params, mine, strict=True):
            assert theirs.state[q]["step"] == 2
            check_equal_states(theirs.state[q], ours.state[p], state_names(ours))
        stepped(ours, params, range(2, 3))
        stepped(theirs, mine, range(2, 3))
        for p, q in zip(params, mine, strict=True):
            assert ((p - q).abs() > 1e-6 + 1e-5 * q.abs()).float().mean() < 1e-3

    def test_other_blocks_and_maps(self):
        """Blocks of 2,048 are requantized, or kept by an optimizer that has them; another map is requantized."""
        x = torch.randn(5000, generator=torch.Generator().manual_seed(1)).square()
        linear = torch.linspace(0, 1, 256)
        for book in (F.create_dynamic_map(signed=False), linear):
            state: dict[str, Any] = {"step": 3}
            for i, (values, code) in enumerate(((x - 1, F.create_dynamic_map(signed=True)), (x, book)), 1):
                codes, made = F.quantize_blockwise(values, code=code, blocksize=2048)
                state |= {f"state{i}": codes, f"qmap{i}": code, f"absmax{i}": made.absmax}
            group = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
            saved = {"state": {0: state}, "param_groups": [group]}
            p = nn.Parameter(torch.zeros(5000))
            wide = {name: dataclasses.replace(q, block=(2048,)) for name, q in optim.BITS8.items() if q is not None}
            same, other = optim.AdamW([p], state=wide), optim.AdamW8bit([p])
            for each in (same, other):
                optim.load_bitsandbytes_state(each, saved)
            want = F.dequantize_blockwise(state["state2"], absmax=state["absmax2"], code=book, blocksize=2048)
            if book is not linear:
                assert torch.equal(same.state[p]["exp_avg_sq"].codes, state["state2"])
                assert torch.equal(hop.dequantize(same.state[p]["exp_avg_sq"], torch.float32), want)
            assert torch.equal(other.state[p]["exp_avg_sq"].codes, hop.quantize(STATE8_UNSIGNED, want).codes)

    def test_written_by_other_quantizers(self):
        """4-bit states are written in 8 bits, bfloat16 ones in float32."""
        params = drawn(((64, 128), (9,)), torch.bfloat16)
        ours = stepped(optim.AdamW4bit(params), params, range(2))
        saved = optim.bitsandbytes_state(ours)["state"]
        for i, (name, q) in enumerate((("exp_avg", STATE8), ("exp_avg_sq", STATE8_UNSIGNED)), 1):
            want = hop.quantize(q, hop.dequantize(ours.state[params[0]][name], torch.float32))
            assert torch.equal(saved[0][f"state{i}"], want.codes)
            assert torch.equal(saved[0][f"absmax{i}"], want.scale.reshape(-1))
            assert torch.equal(saved[1][f"state{i}"], ours.state[params[1]][name].float())

    def test_nothing_is_shared(self):
        params = drawn(SHAPES)
        first = stepped(bnb.optim.AdamW8bit(params), params, range(1))
        kept = first.state[params[0]]["state1"].clone()
        ours = optim.AdamW8bit(params)
        optim.load_bitsandbytes_state(ours, first.state_dict())
        written = optim.bitsandbytes_state(ours)
        stepped(ours, params, range(1, 3))
        assert torch.equal(first.state[params[0]]["state1"], kept)
        assert torch.equal(written["state"][0]["state1"], kept)

    def test_refused_states(self):
        params = drawn(SHAPES)
        first = stepped(bnb.optim.AdamW8bit(params), params, range(1))
        ours = optim.AdamW8bit(params)
        before = copy.deepcopy(ours.state_dict())
        cases: list[tuple[type[Exception], str, str, Any]] = [
            (
                ValueError,
                "absmax1 must be float32, one for each block of 256 or 2048",
                "absmax1",
                torch.ones(3),
            ),
            (ValueError, "absmax2 must be finite and at least 0", "absmax2", torch.full((32,), float("nan"))),
            (ValueError, "qmap1 must be 256 finite values", "qmap1", torch.ones(255)),
            (ValueError, "state1 has codes, which need its qmap1", "qmap1", None),
            (ValueError, "has 'max1', and those that are loaded are", "max1", torch.ones(1)),
            (ValueError, "'unorm_vec' of LAMB", "unorm_vec", torch.ones(1)),
            (ValueError, "exp_avg must be a float tensor of the parameter's shape", "state1", torch.ones(2, 32, 256)),
            (TypeError, "state2 must be a plain tensor, got str", "state2", "x"),
            (TypeError, "state2 must be a plain tensor, got NoneType", "state2", None),
        ]
        for kind, message, key, value in cases:
            saved = first.state_dict()
            saved["state"][0]["__bnb_optimizer_quant_state__"][key] = value
            with pytest.raises(kind, match=message):
                optim.load_bitsandbytes_state(ours, saved)
        saved = first.state_dict()
        saved["state"][9] = saved["state"].pop(0)
        with pytest.raises(ValueError, match="parameter 9 is in no param group"):
            optim.load_bitsandbytes_state(ours, saved)
        assert str(ours.state_dict()) == str(before)

    def test_refused_rules(self):
        params = drawn(((8, 8),))
        for cls, message in ((bnb.optim.AdEMAMix8bit, "three are AdEMAMix's"), (bnb.optim.LAMB8bit, "has 'unorm_vec'")):
            with pytest.raises(ValueError, match=message):
                optim.load_bitsandbytes_state(
                    optim.AdamW8bit(params), stepped(cls(params), params, range(1)).state_dict()
                )
        lion = stepped(bnb.optim.Lion8bit(params), params, range(1)).state_dict()
        with pytest.raises(ValueError, match="has no state 'exp_avg_sq'"):
            optim.load_bitsandbytes_state(optim.AdamW8bit(params), lion)
        adam = stepped(bnb.optim.Adam8bit(params, weight_decay=0.1), params, range(1)).state_dict()
        with pytest.raises(ValueError, match=r"has 'qmap2'|has 'state2', and those"):
            optim.load_bitsandbytes_state(optim.Lion(params), adam)
        with pytest.raises(ValueError, match=r"weight_decay is 0\.1, which bitsandbytes decouples"):
            optim.load_bitsandbytes_state(optim.Adam(params), adam)
        optim.load_bitsandbytes_state(optim.Adam(params, decoupled_weight_decay=True), adam)
        with pytest.raises(ValueError, match="different number of parameter groups"):
            optim.load_bitsandbytes_state(optim.AdamW8bit([{"params": params}, {"params": drawn(((2,),))}]), adam)
        with pytest.raises(TypeError, match=r"optimizer must be one of hop\.optim, got AdamW"):
            optim.load_bitsandbytes_state(torch.optim.AdamW(params), adam)  # pyright: ignore[reportArgumentType]

    @parameterized.expand(
        [
            ("amsgrad", lambda p: optim.AdamW(p, amsgrad=True)),
            ("maximize", lambda p: optim.AdamW(p, maximize=True)),
            ("dampening", lambda p: optim.SGD(p, momentum=0.9, dampening=0.5)),
            ("nesterov", lambda p: optim.SGD(p, momentum=0.9, nesterov=True)),
            ("weight_decay", lambda p: optim.Adam(p, weight_decay=0.1)),
        ]
    )
    def test_not_written(self, option: str, make: Any):
        with pytest.raises(ValueError, match=f"param group 0: {option} must be"):
            optim.bitsandbytes_state(make([nn.Parameter(Tensor([1.0]))]))
