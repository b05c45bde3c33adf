"""What programs do around a step: loss scaling, moving and casting parameters, compiling."""

import copy
import unittest
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import optim
from tests.support.steps import drawn, give_gradients

KINDS = {"adamw8": optim.AdamW8bit, "adamw4": optim.AdamW4bit, "adamw_fp8": optim.AdamWFp8, "lion": optim.Lion}


def parameters() -> list[nn.Parameter]:
    return drawn(((64, 100), (8192,), (5,)))


def numbers(x: Tensor) -> Tensor:
    return hop.dequantize(x, torch.float32) if isinstance(x, hop.QuantizedTensor) else x.float()


def assert_same_states(one: Any, other: Any) -> None:
    a, b = one.state_dict()["state"], other.state_dict()["state"]
    assert a and set(a) == set(b)
    for k in a:
        assert set(a[k]) == set(b[k])
        for name, x in a[k].items():
            assert type(x) is type(b[k][name]) and torch.equal(numbers(x), numbers(b[k][name])), (k, name)


class TestGradScaler(unittest.TestCase):
    @parameterized.expand(KINDS)
    def test_scaled(self, kind: str):
        """As without a scale, which is a power of two; a step with an infinity is none."""
        params = parameters()
        others = copy.deepcopy(params)
        plain, scaled = KINDS[kind](params), KINDS[kind](others)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for i in range(3):
            give_gradients(params, i)
            plain.step()
            grads: list[Any] = [p.grad for p in params]
            loss = torch.stack([(q * g).sum() for q, g in zip(others, grads, strict=True)]).sum()
            scaled.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(scaled)
            scaler.update()
        before = copy.deepcopy(others)
        give_gradients(others, 3)
        assert others[0].grad is not None
        others[0].grad[0, 0] = float("inf")
        scaler.step(scaled)
        scaler.update()
        assert scaler.get_scale() == 512.0
        for p, q, kept in zip(params, others, before, strict=True):
            assert torch.equal(p, q) and torch.equal(q, kept)
        assert_same_states(plain, scaled)


class TestMoved(unittest.TestCase):
    def trained(self, kind: str) -> tuple[list[nn.Parameter], Any]:
        params = parameters()
        optimizer = KINDS[kind](params, lr=1e-2)
        give_gradients(params, 0)
        optimizer.step()
        return params, optimizer

    @parameterized.expand(KINDS)
    def test_new_data(self, kind: str):
        """Parameters whose data are replaced keep their states."""
        params, optimizer = self.trained(kind)
        others, other = copy.deepcopy((params, optimizer))
        for p in others:
            p.data = p.data.clone()
        for group, o in ((params, optimizer), (others, other)):
            give_gradients(group, 1)
            o.step()
        assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
        assert_same_states(optimizer, other)

    @parameterized.expand(KINDS)
    def test_cast(self, kind: str):
        """`module.to(bfloat16)` after the first step: the step is that of float32, rounded to bfloat16; loading what
        was saved makes states of bfloat16, with the same codes."""
        params, optimizer = self.trained(kind)
        for p in params:
            p.data = p.data.to(torch.bfloat16)
        exact = [nn.Parameter(p.detach().float()) for p in params]
        other = KINDS[kind](exact)
        other.load_state_dict(optimizer.state_dict())
        again = KINDS[kind](params)
        again.load_state_dict(optimizer.state_dict())
        for p in params:
            for name, x in again.state[p].items():
                assert x.dtype == (torch.float32 if name == "step" else torch.bfloat16)
                if isinstance(x, hop.QuantizedTensor):
                    assert torch.equal(numbers(x), numbers(optimizer.state[p][name]))
        give_gradients(params, 1)
        for p, q in zip(params, exact, strict=True):
            assert p.grad is not None
            q.grad = p.grad.float()
        optimizer.step()
        other.step()
        for p, q in zip(params, exact, strict=True):
            assert p.dtype == torch.bfloat16 and torch.equal(p, q.to(torch.bfloat16))
        assert_same_states(optimizer, other)

    @parameterized.expand(KINDS)
    def test_meta(self, kind: str):
        """States follow the device of the parameters that they are loaded for."""
        params, optimizer = self.trained(kind)
        others = [nn.Parameter(p.detach().to("meta")) for p in params]
        other = KINDS[kind](others)
        other.load_state_dict(optimizer.state_dict())
        for p, q in zip(params, others, strict=True):
            for name, x in optimizer.state[p].items():
                y = other.state[q][name]
                assert type(x) is type(y) and x.shape == y.shape and x.dtype == y.dtype
                assert y.device.type == ("cpu" if name == "step" else "meta")
                if isinstance(y, hop.QuantizedTensor):
                    assert y.quantizer == x.quantizer and all(b.is_meta for b in y.buffers().values())


class TestCompiled(unittest.TestCase):
    @pytest.mark.full
    def test_groups(self):
        """The first step as one graph, which makes the states of several groups."""
        params = parameters()
        others = copy.deepcopy(params)
        one, other = (
            optim.AdamW8bit([{"params": p[:1]}, {"params": p[1:2], "lr": 0.1}, {"params": p[2:]}])
            for p in (params, others)
        )
        step = torch.compile(lambda: other.step(), fullgraph=True, backend="aot_eager")
        for i in range(2):
            for group in (params, others):
                give_gradients(group, i)
            one.step()
            step()
        assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
        assert_same_states(one, other)
