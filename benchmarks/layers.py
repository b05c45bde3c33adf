"""A linear layer with a prequantized weight, against torchao's and ONNX Runtime's at their best public settings.

torchao's is compiled with freezing and max-autotune, as its documentation recommends for CPUs. Both have inputs and
outputs in the peer's dtype, and the time includes quantizing the input. Ours runs in eager mode, as after
hop.quantize_. Freezing may fold the dequantization of a weight: the compiled program then stores it in bfloat16, with
four times the bytes of int4. ONNX Runtime's layers have float32 inputs and outputs at every level: MatMulNBits for
weights of 4 bits (accuracy level 4 with int8 activations), and DynamicQuantizeLinear with MatMulInteger for int8;
none where the level is forced, because it would use the CPU's own.
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
from hop.kernels.cpu import native

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
    runtime = find_spec("onnxruntime") is not None and find_spec("onnx") is not None
    if not runtime:
        print("no layers of ONNX Runtime without onnxruntime: pip install --editable '.[onnx]'")
    elif native.library().path != native.library().levels()[-1]:
        runtime = False
        print("no layers of ONNX Runtime, which cannot be held to a lower level than the CPU's")
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
                calls = [lambda: ours(x), lambda: theirs(x), lambda: layer(x)]  # noqa: B023
                if runtime and scheme in _ONNX:
                    calls.append(_of_onnxruntime(scheme, m))
                own, torchao, plain, *onnx = interleaved(calls)
            yield Row("layer", title, own, "torchao, compiled", torchao, "<= 1")
            yield Row("layer", title, own, f"{NAME} linear", plain)
            saturates = "; its sums saturate" if scheme == "int8" and native.library().path == "avx2" else ""
            for milliseconds in onnx:
                yield Row("layer", title, own, f"ONNX Runtime, float32{saturates}", milliseconds)


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


_ONNX = {"int8": None, "8da4w": 4, "int4": 0}
"""Schemes that ONNX Runtime has: with the accuracy level of MatMulNBits, or None for MatMulInteger."""


def _of_onnxruntime(scheme: str, rows: int) -> Callable[[], Any]:
    """A call of ONNX Runtime's layer with random codes, on one input of (rows, features)."""
    import numpy
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    n = k = _FEATURES
    random, level = numpy.random.default_rng(0), _ONNX[scheme]
    if level is None:
        constants = {
            "codes": random.integers(-127, 128, (k, n), numpy.int8),
            "scale": numpy.full(n, 0.01, numpy.float32),
        }
        nodes = [
            helper.make_node("DynamicQuantizeLinear", ["x"], ["x_codes", "x_scale", "x_zero"]),
            helper.make_node("MatMulInteger", ["x_codes", "codes", "x_zero"], ["sums"]),
            helper.make_node("Cast", ["sums"], ["floats"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["x_scale", "scale"], ["scales"]),
            helper.make_node("Mul", ["floats", "scales"], ["y"]),
        ]
    else:
        constants = {
            "codes": random.integers(0, 256, (n, k // 32, 16), numpy.uint8),
            "scale": numpy.full((n, k // 32), 0.01, numpy.float32),
        }
        sizes = {"N": n, "K": k, "bits": 4, "block_size": 32, "accuracy_level": level}
        nodes = [helper.make_node("MatMulNBits", ["x", "codes", "scale"], ["y"], domain="com.microsoft", **sizes)]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (rows, _FEATURES)) for name in "xy")
    graph = helper.make_graph(
        nodes, scheme, [x], [y], [numpy_helper.from_array(value, name) for name, value in constants.items()]
    )
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    feed = {"x": random.standard_normal((rows, _FEATURES), numpy.float32)}
    return lambda: session.run(None, feed)


GROUPS = [layers]
