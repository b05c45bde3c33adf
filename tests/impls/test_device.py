"""pytest --device cuda: steps of optimizers, views and ATen's operators of quantized tensors, and FSDP2, on the GPU.

The first two are compared with the CPU, FSDP2 with the unsharded model on the same device. Without a GPU the CPU takes
its place, without the native kernels, and tensors of a GPU without data show where results lie.
"""

import copy
import unittest
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import hop
from hop import optim
from hop.dispatch.kernel import Declined, Kernel
from hop.kernels.cpu import native
from hop.optim import step
from tests.distributed.test_fsdp import batch, built, sharded, stepped
from tests.support import case
from tests.support.on_device import (
    CALLS,
    DTYPES,
    QUANTIZERS,
    STEPS,
    Bound,
    assert_same,
    give_gradients,
    made,
    numbers,
    optimizer_of,
    own,
    restart,
)
from tests.support.processes import run
from tests.support.schemes import EVERY

pytestmark = pytest.mark.full


def left_out(_call: Any) -> Any:
    raise Declined("left out")


WITHOUT = mock.patch.object(step.gpu, "STEP", Kernel("gpu", left_out))  # what benchmarks.gpu_steps checks
KINDS = [(f"{kind}_{d}".replace("torch.", ""), kind, d) for kind in STEPS for d in DTYPES]


def on_fake_gpu(test: unittest.TestCase, function: Callable[[], Any]) -> Any:
    """The result of a function of tensors without data."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return function()
    except RuntimeError as error:
        if "not linked with support for cuda" in str(error):
            test.skipTest("a PyTorch that was built for the CPU slices no fake tensor of a GPU")
        raise


class TestOptimizers(unittest.TestCase):
    @parameterized.expand(KINDS)
    def test_operators_have_the_bits_of_the_cpu(self, _name, kind, dtype):
        """Operator by operator, float32 is rounded alike everywhere: each goes three steps on its own."""
        (params, ours), (others, theirs) = (optimizer_of(kind, dtype, device) for device in ("cpu", case.DEVICE))
        before = [p.detach().clone() for p in params]
        for i in range(3):
            give_gradients(params, i)
            give_gradients(others, i)
            ours.step()
            with native.use("off"), WITHOUT, mock.patch.object(step, "write_fused", step.write_updated):
                theirs.step()
        for p, other, old in zip(params, others, before, strict=True):
            assert not torch.equal(p, old) and other.device.type == case.DEVICE
            assert_same(p.detach(), other.detach())
            for mine, its in zip(own(ours.state[p]), own(theirs.state[other]), strict=True):
                assert its.device.type == case.DEVICE
                assert_same(mine, its)

    @parameterized.expand([k for k in KINDS if k[1] != "stochastic"])
    @pytest.mark.sampled(5)
    @pytest.mark.compiler
    def test_a_fused_step_is_near(self, _name, kind, dtype):
        """What a GPU runs: three steps, each from the CPU's numbers."""
        (params, ours), (others, theirs) = (optimizer_of(kind, dtype, device) for device in ("cpu", case.DEVICE))
        step._compiled()  # before its name is patched
        for i in range(3):
            give_gradients(params, i)
            give_gradients(others, i)
            bounds: list[Bound] = []
            if i > 0:
                restart(ours, params, theirs, others)
                bounds = [Bound(ours, p) for p in params]
            ours.step()
            with native.use("off"), WITHOUT, mock.patch.object(step, "write_updated", step.write_fused):
                theirs.step()
            if i > 0:
                for bound, p, other in zip(bounds, params, others, strict=True):
                    bound.check(ours, p, theirs, other)

    @parameterized.expand(KINDS)
    def test_no_tensor_of_a_step_lies_elsewhere(self, _name, kind, dtype):
        def stepped_on_gpu() -> list[Any]:
            params, optimizer = optimizer_of(kind, dtype, "cuda")
            give_gradients(params, 0)
            optimizer.step()  # makes the states; the operator itself does nothing here
            (group,) = optimizer.param_groups
            rule = optimizer._rule(group)
            found = []
            for p in params:
                states = own(optimizer.state[p])
                quantizers = [str(x.quantizer) if isinstance(x, hop.QuantizedTensor) else "" for x in states]
                buffers = [b for x in states for b in (x.buffers().values() if hasattr(x, "buffers") else (x,))]
                seed = 7 if kind == "stochastic" and dtype == torch.bfloat16 else None
                values = rule.numbers(1.0, group["lr"], optimizer._options(group))
                with mock.patch.object(step, "write_fused", wrote):
                    step._write((str(rule), values, seed, 0, p.detach(), p.grad, quantizers, buffers, ()))
                found += [p, *buffers]
            return found

        results: list[Any] = []
        wrote = mock.Mock(side_effect=lambda *call: results.extend(step.updated(*call)))
        found = on_fake_gpu(self, stepped_on_gpu)
        assert wrote.call_count == 2 and len(results) == len(found)
        assert {x.device.type for x in (*found, *results)} == {"cuda"}


class TestTensors(unittest.TestCase):
    @parameterized.expand([(f"{q.lower()}_{name}", q, name) for q in QUANTIZERS for name in CALLS])
    def test_bits_are_those_of_the_cpu(self, _name, q, name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of results that are no views
            want, got = (CALLS[name](made(q, device), made(q, device, 1)) for device in ("cpu", case.DEVICE))
        plain = CALLS[name](*(numbers(made(q, "cpu", seed)) for seed in (0, 1)))
        wants, gots, plains = ([*x] if isinstance(x, (tuple, list)) else [x] for x in (want, got, plain))
        for a, b, c in zip(wants, gots, plains, strict=True):
            assert b.device.type == case.DEVICE
            assert_same(a, b)
            if name != "copy_numbers":  # which quantizes anew
                assert torch.equal(numbers(b).cpu(), c)

    @parameterized.expand([(f"{q.lower()}_{name}", q, name) for q in QUANTIZERS for name in CALLS])
    def test_results_lie_on_the_device(self, _name, q, name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            found = on_fake_gpu(self, lambda: CALLS[name](made(q, "cuda"), made(q, "cuda", 1)))
        buffers = [b for x in tree_leaves(found) for b in (x.buffers().values() if hasattr(x, "buffers") else (x,))]
        assert buffers and {x.device.type for x in buffers} == {"cuda"}

    def test_other_bits_are_seen(self):
        """Of a code, of a scale, and of the sign of 0."""
        for name in ("codes", "scale"):
            t, other = made("INT8_ROW", "cpu"), made("INT8_ROW", "cpu")
            assert_same(t, other)
            changed = getattr(other, name)
            changed.view(-1)[0] += 1
            with pytest.raises(AssertionError, match="other bits"):
                assert_same(t, other)
        with pytest.raises(AssertionError, match="1 of 1 elements"):
            assert_same(torch.zeros(1), -torch.zeros(1))


# ---- FSDP2, in a process of its own


def one_process(mesh: Any, rank: int) -> None:
    """Forwards of integers are the same to the bit, gradients are sums of floats. From one gradient, a step of each
    optimizer gives the same bits."""
    device = mesh.device_type
    x = [batch(16, 32, i).to(device) for i in range(2)]
    for name in ("INT8_DYNAMIC", "INT8_TRAINING", "FP8_HYBRID", "MXFP8_TRAINING"):
        for make in (optim.AdamW8bit, optim.AdamWFp8, lambda p, **o: optim.SGD(p, momentum=0.9, **o)):
            one = built(EVERY[name]).to(device)
            many = sharded(copy.deepcopy(one), mesh)
            optimizers = [make(m.parameters(), lr=1e-2, min_numel=0) for m in (one, many)]
            pairs = list(zip(one.parameters(), many.parameters(), strict=True))
            for batched in x:
                want, got = stepped(one, batched), stepped(many, batched)
                assert got.device.type == device
                if name.startswith("INT8") or device == "cpu":
                    assert torch.equal(want, got), name
                assert_within(want, got, 2**-16)
                for p, q in pairs:
                    assert isinstance(q, DTensor) and isinstance(q.grad, DTensor)
                    mine, its = p.grad, q.grad.to_local()
                    assert its.device.type == device
                    assert_within(mine, its, 0.0 if device == "cpu" else 2**-16)
                    its.copy_(mine)
                for optimizer in optimizers:
                    optimizer.step()
                for p, q in pairs:
                    assert torch.equal(p, q.full_tensor()), name
                    for a, b in zip(own(optimizers[0].state[p]), own(optimizers[1].state[q]), strict=True):
                        assert_same(a, b.to_local())
                    p.grad = q.grad = None


def assert_within(want: torch.Tensor, got: torch.Tensor, bound: float) -> None:
    """Up to `bound` times the largest."""
    off, largest = (want - got).abs().max(), want.abs().max()
    assert largest > 0 and off <= bound * largest, f"{float(off / largest)}"


class TestSharded(unittest.TestCase):
    @pytest.mark.full
    def test_fsdp_in_one_process(self):
        run(one_process, 1, case.DEVICE)
