"""What tests/impls/test_device.py asks of the CPU and of the device: optimizers with their bounds, calls of tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import hop
from hop import QuantizedTensor, optim, presets
from hop.optim.updates import UpdateRule

aten = torch.ops.aten
EPS = torch.finfo(torch.float32).eps


def put(x: Tensor, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """x on a device. A PyTorch that was built for the CPU describes fake tensors of a GPU, and copies none to it."""
    return torch.empty_like(x, device=device, dtype=dtype) if isinstance(x, FakeTensor) else x.to(device, dtype)


# ---- comparing


def bits(x: Tensor) -> Tensor:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.cpu().contiguous().view(whole)


def assert_same(want: Any, got: Any) -> None:
    """Fail unless a tensor of the device has the bits of the CPU's: codes, scales and the numbers that they stand
    for."""
    assert type(got) is type(want) and (got.shape, got.dtype) == (want.shape, want.dtype), (got, want)
    if isinstance(want, QuantizedTensor):
        assert got.quantizer == want.quantizer, (got.quantizer, want.quantizer)
        for name, buffer in want.buffers().items():
            assert_same(buffer, got.buffers()[name])
        want, got = (hop.dequantize(x) for x in (want, got))
    wrong = int((bits(want) != bits(got)).sum())
    assert wrong == 0, f"{wrong} of {want.numel()} elements have other bits than on the CPU"


# ---- optimizers

STEPS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda p: optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: optim.Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "momentum": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.2, weight_decay=0.1),
    "lion": lambda p: optim.Lion(p, lr=1e-2, weight_decay=0.1),
    "adamw8": lambda p: optim.AdamW8bit(p, lr=1e-2, amsgrad=True),
    "adamw4": lambda p: optim.AdamW4bit(p, lr=1e-2),
    "adamw_fp8": lambda p: optim.AdamWFp8(p, lr=1e-2),
    "stochastic": lambda p: optim.AdamW8bit(p, lr=1e-3, stochastic_rounding=True, seed=3),
}
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((48, 100), (3, 7))  # states with a block that is cut off, and states that stay floats


def optimizer_of(kind: str, dtype: torch.dtype, device: str) -> tuple[list[nn.Parameter], Any]:
    """The same parameters on each device, and their optimizer."""
    g = torch.Generator().manual_seed(0)
    params = [nn.Parameter(put(torch.randn(shape, generator=g), device, dtype)) for shape in SHAPES]
    return params, STEPS[kind](params)


def give_gradients(params: Sequence[nn.Parameter], number: int) -> None:
    """The gradients of a step, the same on each device."""
    g = torch.Generator().manual_seed(1000 + number)
    for p in params:
        p.grad = put(torch.randn(p.shape, generator=g), p.device.type, p.dtype)


def own(state: dict[str, Any]) -> list[Tensor]:
    """The states but the count of steps."""
    return [x for name, x in state.items() if name != "step"]


def restart(optimizer: Any, params: Sequence[Tensor], other: Any, others: Sequence[Tensor]) -> None:
    """Copy parameters and states of an optimizer into those of another."""
    with torch.no_grad():
        for p, q in zip(params, others, strict=True):
            for mine, its in zip((p, *own(optimizer.state[p])), (q, *own(other.state[q])), strict=True):
                its.copy_(mine)


class Bound:
    """How far a step from the same numbers may be off where its operators are fused: products and sums are then rounded
    once or twice, divisions and roots to two units. Sixteen units of float32 are more than an update has, each of the
    sum of the magnitudes, since differences cancel."""

    def __init__(self, optimizer: Any, p: nn.Parameter) -> None:
        group = optimizer.param_groups[0]
        rule: UpdateRule = optimizer._rule(group)
        count = float(optimizer.state[p]["step"]) + 1
        self.numbers = rule.numbers(count, group["lr"], optimizer._options(group))
        x, grad, *states = (numbers(t.detach()).double() for t in (p, p.grad, *own(optimizer.state[p])))
        result, self.states = rule.update(self.numbers, x.abs(), grad.abs(), [s.abs() for s in states])
        self.parameter = 16 * EPS * (2 * x.abs() + result.abs())
        if rule.name == "lion":  # the sign of what nearly cancels may be either
            _, beta, rest, *_, lr = self.numbers
            terms = states[0] * beta, grad * rest
            unsure = sum(terms).abs() <= 4 * EPS * sum(t.abs() for t in terms)
            self.parameter += torch.where(unsure, 2 * lr, 0.0)

    def check(self, optimizer: Any, p: Tensor, other: Any, q: Tensor) -> None:
        """Fail unless a step of q, of the other optimizer, came as near to one of p."""
        _assert_near(p.detach(), q.detach(), self.parameter)
        held = zip(own(optimizer.state[p]), own(other.state[q]), self.states, strict=True)
        for mine, its, magnitudes in held:
            if isinstance(mine, QuantizedTensor):
                _assert_neighbours(mine, its, magnitudes)
            else:
                _assert_near(mine, its, 16 * EPS * magnitudes)


def _assert_near(want: Tensor, got: Tensor, bound: Tensor) -> None:
    assert got.dtype == want.dtype
    if want.dtype != torch.float32:  # which is rounded once more: to a neighbour
        bound = bound + torch.finfo(want.dtype).eps * want.double().abs()
    off = (want.double() - got.cpu().double()).abs()
    assert bool((off <= bound).all()), f"{float((off / bound).max()):.2f} times the bound"


def _assert_neighbours(want: QuantizedTensor, got: Any, magnitudes: Tensor) -> None:
    """Scales are as near as the largest magnitudes of their blocks, codes at most one apart, and few are."""
    assert isinstance(got, QuantizedTensor) and got.quantizer == want.quantizer
    q = want.quantizer
    _assert_near(want.scale, got.scale, 16 * EPS * hop.quantize(q, magnitudes.float()).scale.double())
    ascending, ones = torch.tensor(q.format.numbers), torch.ones_like(want.scale)
    places = [
        torch.searchsorted(ascending, q.dequantize({"codes": codes, "scale": ones}, want.shape))
        for codes in (want.codes, got.codes.cpu())
    ]
    apart = (places[0] - places[1]).abs()
    assert int(apart.max()) <= 1 and float(apart.float().mean()) <= 0.01, (int(apart.max()), apart.float().mean())


# ---- views and ATen's operators


def numbers(x: Any) -> Any:
    """The dequantized values of a tensor, or of each one in a tuple."""
    if isinstance(x, (tuple, list)):
        return [numbers(part) for part in x]
    return hop.dequantize(x) if isinstance(x, QuantizedTensor) else x


QUANTIZERS = {
    name: getattr(presets, name) for name in ("INT8_ROW", "INT4_32", "FP8_ROW", "MXFP8", "NVFP4", "UINT8_TENSOR_AFFINE")
}


def made(name: str, device: str, seed: int = 0) -> QuantizedTensor:
    """A tensor that is quantized on the device."""
    x = torch.randn(4, 6, 64, generator=torch.Generator().manual_seed(seed))
    return hop.quantize(QUANTIZERS[name], put(x, device))


def _written(t: Any, source: Any) -> Any:
    t.copy_(source)
    return t


# Of two tensors, quantized or plain, of shape (4, 6, 64). Brackets take no fake tensor of a GPU.
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "detach": lambda t, u: t.detach(),
    "clone": lambda t, u: t.clone(),
    "contiguous": lambda t, u: t.transpose(0, 1).contiguous(),
    "transpose_first": lambda t, u: t.transpose(0, 1),
    "transpose_last": lambda t, u: t.transpose(1, 2),
    "t": lambda t, u: t.select(0, 0).t(),
    "permute": lambda t, u: t.permute(1, 0, 2),
    "view": lambda t, u: t.view(2, 2, 6, 64),
    "view_groups": lambda t, u: t.view(4, 6, 2, 32),
    "reshape": lambda t, u: t.reshape(24, 64),
    "unsqueeze": lambda t, u: t.unsqueeze(1),
    "squeeze": lambda t, u: t.unsqueeze(0).squeeze(0),
    "expand": lambda t, u: t.expand(3, 4, 6, 64),
    "slice": lambda t, u: aten.slice.Tensor(t, 0, 1, 3),
    "slice_group": lambda t, u: aten.slice.Tensor(t, -1, 32),
    "slice_into_group": lambda t, u: aten.slice.Tensor(t, -1, 3, 7),
    "select": lambda t, u: t.select(0, 2),
    "select_last": lambda t, u: t.select(-1, 5),
    "narrow": lambda t, u: t.narrow(1, 2, 3),
    "split": lambda t, u: t.split(3),
    "split_sizes": lambda t, u: t.split([1, 5], 1),
    "chunk_last": lambda t, u: t.chunk(2, -1),
    "unbind": lambda t, u: t.unbind(1),
    "cat": lambda t, u: torch.cat([t, u]),
    "cat_rows": lambda t, u: torch.cat([t, u], 1),
    "cat_last": lambda t, u: torch.cat([t, u], -1),
    "stack": lambda t, u: torch.stack([t, u]),
    "stack_last": lambda t, u: torch.stack([t, u], -1),
    "pad": lambda t, u: torch.nn.functional.pad(t, (0, 32, 0, 2)),
    "pad_value": lambda t, u: torch.nn.functional.pad(t, (0, 0, 0, 2), value=1.0),
    "index_select": lambda t, u: t.index_select(0, torch.tensor([2, 0, 2], device=t.device)),
    "zeros_like": lambda t, u: torch.zeros_like(t),
    "zero_": lambda t, u: t.zero_(),
    "copy_": lambda t, u: _written(t, u),
    "copy_numbers": lambda t, u: _written(t, numbers(u)),
    "copy_to_plain": lambda t, u: torch.empty(t.shape, device=t.device).copy_(t),
    "copy_from_cpu": lambda t, u: _written(t, u.cpu()),
    "bfloat16": lambda t, u: t.to(torch.bfloat16),
    "float64": lambda t, u: t.to(torch.float64),
    "there_and_back": lambda t, u: t.cpu().to(t.device),
}
