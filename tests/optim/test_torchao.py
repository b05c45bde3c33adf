"""States of torchao's optimizers go on in ours, with the same codes and scales."""

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
from hop.numerics.packing import unpack
from hop.numerics.presets import STATE4, STATE4_UNSIGNED
from tests.support.files import read_back
from tests.support.steps import drawn, give_gradients

pytest.importorskip("torchao", reason="torchao is not installed")
from torchao import optim as theirs

KINDS: dict[str, tuple[Any, Any]] = {
    "8bit": (theirs.AdamW8bit, optim.AdamW8bit),
    "4bit": (theirs.AdamW4bit, optim.AdamW4bit),
    "fp8": (theirs.AdamWFp8, optim.AdamWFp8),
}
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    return drawn(((32, 256), (4, 3, 512), (7,)), dtype)


def stepped(optimizer: Any, params: Any, steps: range) -> None:
    """torchao compiles each step, which takes half a minute; it computes the same without."""
    with torch.compiler.set_stance("force_eager"):
        for i in steps:
            give_gradients(params, i)
            optimizer.step()


def codes_of(x: Any) -> Tensor:
    """Of a state of either library, one for each element, in order."""
    if isinstance(x, hop.QuantizedTensor):
        return unpack(x.codes, 4, x.numel(), torch.uint8) if x.quantizer.per_byte() == 2 else x.codes
    if type(x).__name__ == "OptimState4bit":
        return torch.stack([x.codes >> 4, x.codes & 15], -1).view(-1)
    return x.codes


def neighbours(x: Tensor, y: Tensor) -> Tensor:
    """How many codes lie between two. Those of e4m3 ascend with their bits, for either sign."""
    if x.dtype == torch.float8_e4m3fn:
        x, y = (torch.where(b < 0, -128 - b, b) for b in (c.view(torch.int8).int() for c in (x, y)))
    return (x.int() - y.int()).abs()


class TestTorchao(unittest.TestCase):
    @parameterized.expand([(f"{k}_{d}", k, d) for k in KINDS for d in (torch.float32, torch.bfloat16)])
    def test_goes_on(self, _name: str, kind: str, dtype: torch.dtype):
        one, other = KINDS[kind]
        params = parameters(dtype)
        first = one(params, **OPTIONS)
        stepped(first, params, range(3))
        read = read_back(first.state_dict(), weights_only=True)
        mine = [nn.Parameter(p.detach().clone()) for p in params]
        ours = other(mine)
        optim.load_torchao_state(ours, read)
        group = ours.param_groups[0]
        assert type(group["lr"]) is float
        assert abs(group["lr"] - 1e-2) < 1e-9 and group["betas"] == (0.8, 0.95) and group["weight_decay"] == 0.1
        for p, q in zip(params, mine, strict=True):
            assert ours.state[q]["step"] == 3
            for name in ("exp_avg", "exp_avg_sq"):
                x, y = first.state[p][name], ours.state[q][name]
                assert y.dtype == dtype and isinstance(y, hop.QuantizedTensor) == (p.numel() >= 4096)
                if p.numel() < 4096:
                    assert torch.equal(x, y)
                    continue
                assert torch.equal(codes_of(x).view(torch.uint8), codes_of(y).view(torch.uint8))
                assert torch.equal(x.scale, y.scale)
                assert torch.equal(x.dequantize().float(), hop.dequantize(y, torch.float32))
        before = copy.deepcopy(first.state_dict()["state"][0]["step"])
        stepped(first, params, range(3, 4))
        stepped(ours, mine, range(3, 4))
        assert before == 3
        for p, q in zip(params, mine, strict=True):
            torch.testing.assert_close(p, q, rtol=8e-3 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
            for name in ("exp_avg", "exp_avg_sq") if p.numel() >= 4096 else ():
                x, y = first.state[p][name], ours.state[q][name]
                torch.testing.assert_close(x.scale, y.scale, rtol=1e-6, atol=0.0)
                apart = neighbours(codes_of(x), codes_of(y))
                assert apart.max() <= 1 and (apart > 0).float().mean() < 1e-3, (name, apart.max(), (apart > 0).sum())

    def test_amsgrad(self):
        """torchao cannot step with it; its states are made by its own functions here."""
        params = parameters(torch.float32)[:1]
        ours = optim.AdamW8bit(params, amsgrad=True)
        make = theirs.AdamW8bit(params)._new_buffer
        states = {name: make(params[0], name == "exp_avg") for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
        saved = theirs.AdamW8bit(params, amsgrad=True).state_dict()
        optim.load_torchao_state(ours, {**saved, "state": {0: {"step": torch.tensor(2.0), **states}}})
        assert torch.equal(ours.state[params[0]]["max_exp_avg_sq"].codes, states["max_exp_avg_sq"].codes)

    def test_other_blocks(self):
        """Quantized anew, or taken as they are by an optimizer with these blocks."""
        params = parameters(torch.float32)
        first = theirs.AdamW4bit(params, block_size=256, **OPTIONS)
        stepped(first, params, range(2))
        state = {
            "exp_avg": dataclasses.replace(STATE4, block=(256,)),
            "exp_avg_sq": dataclasses.replace(STATE4_UNSIGNED, block=(256,)),
        }
        same, other = optim.AdamW(params, state=state), optim.AdamW4bit(params)
        for ours in (same, other):
            optim.load_torchao_state(ours, first.state_dict())
        for p in params[:2]:
            x, y, z = (o.state[p]["exp_avg"] for o in (first, same, other))
            assert torch.equal(codes_of(x), codes_of(y)) and torch.equal(x.scale, y.scale)
            assert z.quantizer == STATE4
            assert torch.equal(z.codes, hop.quantize(STATE4, x.dequantize()).codes)

    def test_nothing_is_shared(self):
        params = parameters(torch.float32)
        first = theirs.AdamW8bit(params, **OPTIONS)
        stepped(first, params, range(1))
        kept = first.state[params[0]]["exp_avg"].codes.clone()
        ours = optim.AdamW8bit(params)
        optim.load_torchao_state(ours, first.state_dict())
        stepped(ours, params, range(1, 3))
        assert torch.equal(first.state[params[0]]["exp_avg"].codes, kept)
        assert first.param_groups[0]["lr"].dtype == torch.float32 and first.state[params[0]]["step"] == 1

    def test_errors(self):
        params = parameters(torch.float32)
        first = theirs.AdamW8bit(params, **OPTIONS)
        stepped(first, params, range(1))
        saved = first.state_dict()
        with pytest.raises(TypeError, match=r"optimizer must be one of hop\.optim, got AdamW"):
            optim.load_torchao_state(torch.optim.AdamW(params), saved)  # pyright: ignore[reportArgumentType]
        ours = optim.AdamW8bit(params)
        with pytest.raises(ValueError, match=r"with 'state' and 'param_groups'; got \['state'\]"):
            optim.load_torchao_state(ours, {"state": saved["state"]})
        with pytest.raises(ValueError, match="different number of parameter groups"):
            optim.load_torchao_state(optim.AdamW8bit([{"params": params[:1]}, {"params": params[1:]}]), saved)
        saved["state"][0]["exp_avg"].qmap[3] += 1
        with pytest.raises(ValueError, match="state 'exp_avg' of parameter 0: its codebook is not that of dynamic8"):
            optim.load_torchao_state(ours, saved)
        saved["state"][0]["exp_avg"] = nn.Parameter(torch.ones(2))
        with pytest.raises(
            TypeError, match="state 'exp_avg' of parameter 0 must be a tensor, or one of OptimState8bit"
        ):
            optim.load_torchao_state(ours, saved)
