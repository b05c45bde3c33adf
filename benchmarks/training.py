"""Forward and backward of a linear layer trained in int8, compiled, against floats and torchao's fake quantization.

All weights are floats and quantized in every call. Compilation, and creating the operands and the gradient of the
result, are not timed.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import hop
from benchmarks.peers import FLOAT, NAME
from benchmarks.timing import Row, interleaved

aten = torch.ops.aten
_SHAPES = ((512, 1024, 1024), (1024, 1024, 4096))
# Our schemes, with the target relative to floats; the target relative to torchao is the same for both.
_SCHEMES = {
    "int8, backward in int8": (hop.recipes.INT8_TRAINING, "<= 0.8"),
    f"int8, backward in {NAME}": (hop.schemes.INT8_DYNAMIC, "<= 1.3"),
}
_PEER = "torchao fake quantized"


def training() -> Iterator[Row]:
    """(M, K) rows by an (N, K) weight, in the peer's dtype, no bias; gradients of both."""
    if find_spec("torchao") is None:
        print("no training without torchao: pip install --editable '.[dev]'")
        return
    for m, k, n in _SHAPES:
        torch.manual_seed(0)
        x, w, g = (torch.randn(s).to(FLOAT) for s in ((m, k), (n, k), (m, n)))
        x.requires_grad_()
        steps = [_step(lambda x, w, s=s: hop.quantized(aten.linear.default, s, x, w), x, w, g) for s, _ in _schemes()]
        steps += [_step(torch.nn.functional.linear, x, w, g), _step(_fake_quantized(w), x, w, g)]
        *ours, floats, torchao = interleaved(steps, rounds=150, budget_s=20.0)
        for case, ms, (_, target) in zip(_SCHEMES, ours, _schemes(), strict=True):
            yield Row("training", f"{case}, {m}x{k}x{n}", ms, NAME, floats, target)
            yield Row("training", f"{case}, {m}x{k}x{n}", ms, _PEER, torchao, "<= 0.8")
        yield Row("training", f"{NAME}, {m}x{k}x{n}", floats, _PEER, torchao)


def _schemes() -> list[tuple[hop.Scheme, str]]:
    return list(_SCHEMES.values())


def _step(linear: Callable[[Tensor, Tensor], Any], x: Tensor, w: Tensor, g: Tensor) -> Callable[[], Any]:
    """A compiled forward and backward, after a first run."""
    weight = w.clone().requires_grad_()
    torch._dynamo.reset()
    program = torch.compile(linear, fullgraph=True)

    def step() -> Any:
        return torch.autograd.grad(program(x, weight), (x, weight), g)

    step()
    return step


def _fake_quantized(w: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """torchao's int8 layer as a function of its weight: asymmetric per token, its only option for activations, and
    symmetric per channel.
    """
    from torchao.quantization.qat import FakeQuantizedLinear, IntxFakeQuantizeConfig

    activations = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    weights = IntxFakeQuantizeConfig(torch.int8, "per_channel", is_symmetric=True)
    n, k = w.shape
    layer = FakeQuantizedLinear(k, n, bias=False, activation_config=activations, weight_config=weights).to(w.dtype)

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    return linear


GROUPS = [training]
