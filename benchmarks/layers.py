"""A linear layer with a prequantized weight, against torchao's layer at its best public setting.

torchao's is compiled with freezing and max-autotune, as its documentation recommends for CPUs. Both have inputs and
outputs in the peer's dtype, and the time includes quantizing the input. Ours runs in eager mode, as after
hop.quantize_. Freezing may fold the dequantization of a weight: the compiled program then stores it in bfloat16, with
four times the bytes of int4.
"""

import contextlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import hop
from benchmarks.peers import FLOAT, NAME
from benchmarks.timing import Row, interleaved

_ROWS = (1, 128)
_FEATURES = 4096


def _cases() -> dict[str, tuple[str, Callable[[], Any]]]:
    """Our scheme and torchao's configuration for each case."""
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8DynamicActivationIntxWeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
    )
    from torchao.quantization.granularity import PerGroup

    group, int4 = PerGroup(32), getattr(torch, "int4")  # noqa: B009  (torch's stubs do not know it)
    return {
        "int8, dynamic rows": ("int8", Int8DynamicActivationInt8WeightConfig),
        "int8, weight alone": ("int8_weight", Int8WeightOnlyConfig),
        "8da4w, groups of 32": (
            "8da4w",
            lambda: Int8DynamicActivationIntxWeightConfig(weight_dtype=int4, weight_granularity=group),
        ),
        "int4 weight, groups of 32": (
            "int4",
            lambda: IntxWeightOnlyConfig(weight_dtype=int4, granularity=group),
        ),
    }


def layers() -> Iterator[Row]:
    """A layer of 4096 by 4096 with 1 and 128 rows, against torchao's and against floats."""
    if find_spec("torchao") is None:
        print("no layers without torchao: pip install --editable '.[dev]'")
        return
    for case, (scheme, config) in _cases().items():
        torch.manual_seed(0)
        layer = torch.nn.Linear(_FEATURES, _FEATURES, dtype=FLOAT).requires_grad_(False)
        ours = hop.quantize_(torch.nn.Sequential(_copy(layer)), scheme)
        theirs = _of_torchao(layer, config())
        for m in _ROWS:
            x = torch.randn(m, _FEATURES, dtype=FLOAT)
            title = f"{case}, {m}x{_FEATURES}x{_FEATURES}"
            with torch.no_grad(), _frozen():
                theirs(x)  # compile for this number of rows before timing
                own, torchao, plain = interleaved([lambda: ours(x), lambda: theirs(x), lambda: layer(x)])  # noqa: B023
            yield Row("layer", title, own, "torchao, compiled", torchao, "<= 1")
            yield Row("layer", title, own, f"{NAME} linear", plain)


def _copy(layer: torch.nn.Linear) -> torch.nn.Linear:
    result = torch.nn.Linear(_FEATURES, _FEATURES, dtype=layer.weight.dtype).requires_grad_(False)
    result.load_state_dict(layer.state_dict())
    return result


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    from torch._inductor import config

    quiet = {"autotune_num_choices_displayed": 0, "max_autotune_report_choices_stats": False}
    with config.patch(freezing=True, **quiet):
        yield


def _of_torchao(layer: torch.nn.Linear, config: Any) -> Callable[[Tensor], Tensor]:
    from torchao.quantization import quantize_

    model = torch.nn.Sequential(_copy(layer)).eval()
    quantize_(model, config)
    torch._dynamo.reset()
    return torch.compile(model, mode="max-autotune", dynamic=False)


GROUPS = [layers]
