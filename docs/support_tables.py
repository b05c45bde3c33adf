"""Tables of docs/support.md: what runs where. Each cell comes from the library's tables, from hop.explain, or from the
lists of what tests run."""

import ast
import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import hop
from cutlass_kernels import operators as gpu_operators
from cutlass_kernels import registry
from hop import formats, presets
from hop.dispatch.kernel import Declined
from hop.dispatch.operators import CONVOLUTION, MATRIX, TABLE, Family
from hop.dispatch.operators import SCALED as SUPPORTED
from hop.export import targets
from hop.impls.quantized import calls as quantized_calls
from hop.impls.scaled import gpu, gpu_nibbles
from hop.impls.scaled.calls import Call
from hop.kernels.cpu import native
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme
from hop.tensor.quantized import operand
from tests.distributed import test_fsdp as fsdp
from tests.support import pages
from tests.support.executorch_support import FLOAT8
from tests.support.scaled import SCALED, P, Q, ScaledOperator
from tests.support.schemes import EVERY

aten = torch.ops.aten
YES, NO = "yes", "–"

# ---- formats by families

# By column: the quantizer of both factors or of the operand. None leaves that of the test's own call, which is int8.
FORMATS: dict[str, Quantizer | None] = {
    "int8": None,
    "int4 in groups": presets.INT4_32,
    "ternary": presets.TERNARY_TENSOR,
    "fp8": presets.FP8_TENSOR,
    "MXFP8": presets.MXFP8,
    "MXFP4": presets.MXFP4,
    "NVFP4": presets.NVFP4,
    "codebook": Quantizer(formats.NF4, (1, 32)),
}
SUMS = (
    ScaledOperator("sum", aten.sum.dim_IntList, (Q((4, 6)), [1])),
    ScaledOperator("norm", aten.linalg_vector_norm.default, (Q((4, 6)), 2, [1])),
)
"""Calls of the families that the tests' list leaves to tests of models."""


def _calls() -> Iterator[tuple[str, ScaledOperator]]:
    """One call of each family of hop.scaled, with its label; of products also one with a float left factor."""
    by_family: dict[Family, ScaledOperator] = {}
    for operator in (*SCALED, *SUMS):
        by_family.setdefault(TABLE[operator.op].family, operator)
    assert by_family.keys() == {row.family for row in SUPPORTED.values()}
    linear = next(o for o in SCALED if o.op is aten.linear.default)
    convolution = next(o for o in SCALED if o.op is aten.conv2d.default)
    for family, operator in by_family.items():
        if family is MATRIX:
            yield "matrix product", linear
            yield "float32 × a weight", _with_plain_input(linear)
        elif family is CONVOLUTION:
            yield "convolution", convolution
            yield "convolution of float32 by a weight", _with_plain_input(convolution)
        else:
            yield family.name, operator


def _with_plain_input(operator: ScaledOperator) -> ScaledOperator:
    first, *rest = operator.args
    return replace(operator, args=(P(first.shape), *rest))


def _in(operator: ScaledOperator, q: Quantizer | None) -> ScaledOperator:
    """The call with all quantized operands in `q`, to floats."""

    def one(x: Any) -> Any:
        if isinstance(x, list):
            return [one(v) for v in x]
        return replace(x, quantizer=q) if isinstance(x, Q) and q is not None else x

    return replace(operator, args=tuple(map(one, operator.args)), output=torch.float32)


def _kernel(explain: Callable[[], str]) -> str:
    """The kind of the kernel that hop.explain names; – for a call that raises."""
    try:
        chosen = explain().splitlines()[-1].removesuffix(": chosen")
    except ValueError:
        return NO
    if chosen == "reference":
        return chosen
    return "native" if chosen.startswith("native") else "ATen"


def families() -> str:
    """The kind of kernel of each family of hop.scaled in each format, on CPU."""
    by_kernels: dict[tuple[str, ...], list[str]] = {}
    for label, call in _calls():
        kernels = tuple(_kernel(_in(call, q).explained) for q in FORMATS.values())
        by_kernels.setdefault(kernels, []).append(label)
    rows = [["; ".join(labels), *kernels] for kernels, labels in by_kernels.items() if len({*kernels}) > 1]
    alike = [
        f"* **{kernels[0]}** in each format: {', '.join(labels)}\n"
        for kernels, labels in by_kernels.items()
        if len({*kernels}) == 1
    ]
    return pages.table([["operators", *FORMATS], *rows]) + "\n" + "".join(alike)


# ---- schemes

WIDTH = 512
HOPPER = (9, 0)


def schemes() -> str:
    """What runs a linear layer of each scheme, which other layers it applies to, and where it is tested."""
    header = [
        "scheme",
        "CPU kernel",
        "Hopper kernel",
        "convolutions",
        "embeddings",
        "backward multiplies",
        "FSDP2 tests",
        "ExecuTorch",
    ]
    by_cells: dict[tuple[str, ...], list[str]] = {}
    for name, scheme in EVERY.items():
        x, w = (_described(q, n) for q, n in ((scheme.lhs, 16), (scheme.rhs, WIDTH)))
        cpu = _kernel(lambda x=x, w=w: hop.explain(aten.linear.default, torch.bfloat16, x, w))
        layers = [_applies(layer, scheme) for layer in (torch.nn.Conv2d(4, 8, 3), torch.nn.Embedding(32, 64))]
        backward = "codes" if scheme.backward == "quantized" else "floats"
        row = (cpu, _hopper(x, w), *layers, backward, YES if name in fsdp.SCHEMES else "", _executorch(scheme))
        by_cells.setdefault(row, []).append(f"`{name}`")
    return pages.table([header, *([" ".join(names), *cells] for cells, names in by_cells.items())])


def _described(q: Quantizer | None, rows: int) -> Any:
    """A matrix of a quantizer, or of bfloat16, with memory that nobody has written."""
    if q is None:
        return torch.empty(rows, WIDTH, dtype=torch.bfloat16)
    proto = hop.TensorProto((rows, WIDTH), torch.bfloat16, quantizer=q)
    return proto.create_tensor([torch.empty(b.shape, dtype=b.dtype) for b in proto.buffers()])


def _hopper(x: Any, w: Any) -> str:
    """Which of our GPU kernels computes x times w on Hopper."""
    call = Call(aten.linear.default, torch.bfloat16, None, None, (operand(x), operand(w)), {})
    with contextlib.suppress(Declined):
        gpu_nibbles.check_form(call)
        return YES
    try:
        product = gpu.asked(call).product
    except Declined:
        return NO
    installed = (mock.patch.object(m, "missing", lambda: None) for m in (gpu_operators, registry))
    with contextlib.ExitStack() as stack:
        for each in installed:
            stack.enter_context(each)
        name, reason = gpu_operators.routes(product, HOPPER)[-1]
    return NO if reason is not None or name != "hopper" else YES


def _applies(layer: torch.nn.Module, scheme: Scheme) -> str:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "convert: no layer was converted")
        return YES if hop.nn.convert(layer, scheme).hop_report.rows[0].scheme is not None else NO


def _executorch(scheme: Scheme) -> str:
    """Whether the portable kernels of ExecuTorch have the dtypes of a scheme's buffers."""
    quantizers = [q for q in (scheme.lhs, scheme.rhs) if q is not None]
    dtypes = {dtype for q in quantizers for _, dtype in q.buffers((WIDTH, WIDTH)).values()}
    return NO if dtypes & {*FLOAT8} else YES


# ---- families by runtimes

# By column: the targets of 8 and of 16 bits.
RUNTIMES = {
    "LiteRT": (targets.TFLITE, targets.TFLITE_16X8),
    "TensorFlow Lite Micro": (targets.TFLITE_MICRO, targets.TFLITE_MICRO_16X8),
    "TOSA": (targets.TOSA_1_0, targets.TOSA_1_0_INT16),
    "onnxruntime QOperator": (targets.ONNX_INTEGER, None),
}


def runtimes() -> str:
    """The operators of each family that training and each integer runtime support."""
    by_family: dict[Family, list[Any]] = {}
    for op, row in SUPPORTED.items():
        by_family.setdefault(row.family, []).append(op)
    by_cells: dict[tuple[str, ...], list[str]] = {}
    for family, ops in by_family.items():
        names = {_packet(op) for op in ops}
        trained = {_packet(op) for op in ops if op in quantized_calls.OPERATORS}
        cells = [_names(trained, names)]
        for narrow, wide in RUNTIMES.values():
            of_8, of_16 = ({_packet(op) for op in ops if t is not None and op in t} for t in (narrow, wide))
            cells.append(_names(of_8 | of_16, names, {} if wide is None else {"int8": of_8, "int16": of_16}))
        by_cells.setdefault(tuple(cells), []).append(family.name)
    rows = [["; ".join(names), *cells] for cells, names in by_cells.items()]
    return pages.table([["operators", "`hop.quantized`", *RUNTIMES], *rows])


def _packet(op: Any) -> str:
    return str(op.overloadpacket).removeprefix("aten.")


def _names(found: set[str], of: set[str], widths: dict[str, set[str]] = {}) -> str:  # noqa: B006, it is only read
    """Names in a cell: all of a family, none, or a list. Those that only one width of codes has are marked."""
    if not found:
        return NO
    marks = {n: [w for w, has in widths.items() if n in has] for n in found}
    if len(of) > 3 and all(len(m) in (0, len(widths)) for m in marks.values()) and len(of - found) <= 2:
        return "all" + (" but " + " and ".join(f"`{n}`" for n in sorted(of - found)) if found != of else "")
    return " ".join(f"`{n}`" + (f" ({marks[n][0]})" if len(marks[n]) == 1 else "") for n in sorted(found))


# ---- levels of CPU

DEMO = Path(__file__).parents[1] / "examples" / "minilm.py"


def _constant(name: str) -> Any:
    """A constant of the demo, which imports packages that this program does not need."""
    for node in ast.parse(DEMO.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            named = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(named, ast.Name) and named.id == name:
                return eval(compile(ast.Expression(node.value), DEMO.name, "eval"), {})
    raise KeyError(name)


def levels() -> str:
    """What multiplies at each level of CPU, as the demo explains its rows."""
    arithmetic, narrow = _constant("ARITHMETIC"), _constant("NARROW")
    rows = [["level", "8-bit integers", "8-bit by 4-bit integers", "floats of 8 and 4 bits, bfloat16"]]
    for architecture, names in native.LEVELS_OF.items():
        for name in names:
            integers, floats = arithmetic[name]
            label = f"`{name}`" if name != "portable" else f"`portable`, {architecture.replace('_', '-')}"
            rows.append([label, integers, narrow.get(name, integers), floats])
    return pages.table(rows)


TABLES: dict[str, Callable[[], str]] = {
    ": families": families,
    ": schemes": schemes,
    ": runtimes": runtimes,
    ": levels": levels,
}
