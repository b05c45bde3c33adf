"""Read the parameters of quantize and dequantize operators, whichever library defines them.

    x ≈ (code - zero_point) · scale,   low <= code <= high

The operators are torch's (`quantized_decomposed`) and torchao's. They are recognized by name, so that neither library
has to be imported.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from hop.compat.eager import OpOverload
from hop.compat.export import quantized_decomposed
from hop.compat.pytree import Args, Kwargs
from hop.compat.tracing import is_erased, known_equal
from hop.export.rewrite.program import value
from hop.numerics.blocks import Block
from hop.numerics.formats import INT8, INT16, UINT8, Integer

FORMATS: dict[torch.dtype, Integer] = {f.dtype: f for f in (INT8, UINT8, INT16)}
RANGES = {t: (torch.iinfo(t).min, torch.iinfo(t).max) for t in (torch.int8, torch.uint8, torch.int16, torch.int32)}


class Encoding(NamedTuple):
    """The parameters of a node that quantizes or dequantizes its argument."""

    tensor: Node  # the operand
    scale: Any  # a number or a node
    zero_point: Any  # a number, a node or None
    block: Block  # the block of elements that share a scale
    codes: torch.dtype
    low: int
    high: int
    output: torch.dtype | None  # the dtype of dequantized values

    def parameters(self) -> tuple[Any, ...]:
        """The fields that determine the codes of given values."""
        return self[1:-1]

    def is_whole_range(self) -> bool:
        """Whether codes may take every value of their dtype."""
        return (self.low, self.high) == RANGES[self.codes]

    def shown(self) -> str:
        """The codes' dtype and block, for reports."""
        return f"{str(self.codes).removeprefix('torch.')}[{sizes_of(self.block)}]"


class Choice(NamedTuple):
    """A node that computes a scale and a zero point, as a function in plain ATen."""

    function: Callable[..., tuple[Tensor, Tensor]]
    arguments: Args


def dequantizing(node: Node) -> Encoding | None:
    """The encoding of a node that dequantizes; None for any other node."""
    return _read(node, DEQUANTIZE)


def quantizing(node: Node) -> Encoding | None:
    """The encoding of a node that quantizes; None for any other node."""
    return _read(node, QUANTIZE)


def choosing(node: Node) -> Choice | None:
    """The choice of scale that a node computes; None if it computes none, or in an unknown way."""
    name = _name(node)
    if name not in CHOOSE:
        return None
    given = _bound(node)
    return Choice(CHOOSE[name], tuple(given.values()))


def arithmetic(node: Node) -> Callable[..., Tensor] | None:
    """A function of the node's arguments that computes its codes in ATen, if they differ from round(float32(x) · (1 /
    float32(scale))) + zero_point; None if they do not.
    """
    name = _name(node)
    if name == f"{_T}quantize_per_token":
        return _token_codes
    if name == f"{_A}quantize_affine" and torch.float32 not in (value(node.args[0]).dtype, value(node.args[2]).dtype):
        return node.target  # type: ignore[return-value]  # computes in the dtype of x; decomposes into ATen
    return None


def is_encoding(node: Node) -> bool:
    """Whether a node is an operator of these libraries that computes or reads codes, known here or not."""
    name = _name(node)
    return name.startswith(("quantized_decomposed::", "torchao::")) and "quant" in name


def operator_call(verb: str, e: Encoding) -> tuple[OpOverload, tuple[Any, ...]]:
    """The torch operator with the parameters of `e`, and its arguments; `verb` is "quantize" or "dequantize".

    Per-channel scales have one dimension, per-token scales as many as the tensor. A per-tensor scale is a number, or a
    node like its zero point.
    """
    parameters, bounds = (e.tensor, e.scale, e.zero_point), (e.low, e.high, e.codes)
    if all(b == -1 for b in e.block):
        overload = ".tensor" if isinstance(e.scale, Node) else ""
        return quantized_decomposed(f"{verb}_per_tensor{overload}"), (*parameters, *bounds)
    output = () if verb == "quantize" else (e.output or torch.float32,)
    if e.block[-1] not in (1, -1):
        return quantized_decomposed(f"{verb}_per_channel_group"), (*parameters, *bounds, e.block[-1], *output)
    if len(value(e.scale).shape) == 1:
        return quantized_decomposed(f"{verb}_per_channel"), (*parameters, e.block.index(1), *bounds)
    return quantized_decomposed(f"{verb}_per_token"), (*parameters, *bounds, *output)


def _read(node: Node, table: dict[str, Callable[..., Encoding | None]]) -> Encoding | None:
    read = table.get(_name(node))
    encoding = read(node, _bound(node)) if read else None
    return encoding if encoding and encoding.codes in RANGES else None


def _name(node: Node) -> str:
    target = node.target
    return target.name() if isinstance(target, OpOverload) else ""


def _bound(node: Node) -> dict[str, Any]:
    """The arguments of a node by name, including defaults."""
    result = {}
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        default = argument.default_value if argument.has_default_value() else None
        result[argument.name] = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, default)
    return result


def _encoding(given: Kwargs, block: Block, scale: str = "scale", zero_point: str = "zero_point") -> Encoding | None:
    dtype = given.get("dtype") or given.get("input_dtype") or given.get("output_dtype")
    low, high = given["quant_min"], given["quant_max"]
    if dtype not in RANGES or isinstance(low, Node) or isinstance(high, Node):
        return None
    low, high = (bound if x is None else int(x) for x, bound in zip((low, high), RANGES[dtype], strict=True))
    output = given.get("out_dtype") or (
        given.get("output_dtype") if "input_dtype" in given or "dtype" in given else None
    )
    return Encoding(given["input"], given[scale], given[zero_point], block, dtype, low, high, output)


def _per_tensor(node: Node, given: Kwargs) -> Encoding | None:
    return _encoding(given, (-1,))


def _per_channel(node: Node, given: Kwargs) -> Encoding | None:
    ndim = len(value(given["input"]).shape)
    axis = given["axis"] % ndim
    return _encoding(given, tuple(1 if i == axis else -1 for i in range(ndim)), "scales", "zero_points")


def _per_token(node: Node, given: Kwargs) -> Encoding | None:
    return _encoding(given, (1, -1), "scales", "zero_points")


def _per_group(node: Node, given: Kwargs) -> Encoding | None:
    return _encoding(given, (1, given["group_size"]), "scales", "zero_points")


def _affine(node: Node, given: Kwargs) -> Encoding | None:
    sizes = value(given["input"]).shape
    block = [value(b) for b in given["block_size"]]
    if len(block) != len(sizes):
        return None
    whole = [
        -1 if known_equal(b, n) and not (isinstance(n, int) and n == 1) else b
        for b, n in zip(block, sizes, strict=True)
    ]
    return _encoding(given, tuple(whole)) if all(isinstance(b, int) for b in whole) else None


_T, _A = "quantized_decomposed::", "torchao::"
_READ: dict[str, Callable[[Node, dict[str, Any]], Encoding | None]] = {
    f"{_T}%s_per_tensor": _per_tensor,
    f"{_T}%s_per_tensor.tensor": _per_tensor,
    f"{_T}%s_per_tensor.tensor2": _per_tensor,
    f"{_T}%s_per_channel": _per_channel,
    f"{_T}%s_per_token": _per_token,
    f"{_T}%s_per_channel_group": _per_group,
    f"{_A}%s_affine": _affine,
}
QUANTIZE = {name % "quantize": read for name, read in _READ.items()}
DEQUANTIZE = {name % "dequantize": read for name, read in _READ.items()}


def _token_codes(x: Tensor, scales: Tensor, zero_points: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Per-token codes: computed in float64, with the zero point added before rounding."""
    steps = x * (1.0 / scales.to(torch.float64)) + zero_points
    return steps.round().clamp(low, high).to(dtype)


# ---- computation of scales


def _affine_scale(low: Tensor, high: Tensor, least: int, greatest: int, eps: float) -> tuple[Tensor, Tensor]:
    """The scale that maps low..high, extended to include 0, to least..greatest, and the code of 0."""
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    scale = ((high - low) / float(greatest - least)).clamp(min=eps)
    return scale, (least - (low / scale).round()).clamp(least, greatest)


def _all(x: Tensor) -> list[int]:
    """All dimensions of x, given explicitly because torch.onnx does not translate amin and amax without any."""
    return list(range(x.dim()))


def _per_tensor_affine(x: Tensor, least: int, greatest: int, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale, zero_point = _affine_scale(x.amin(_all(x)), x.amax(_all(x)), least, greatest, eps)
    return scale.reshape(1), zero_point.reshape(1)


def _per_tensor_symmetric(
    x: Tensor, least: int, greatest: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    scale = (x.abs().amax(_all(x)) / ((greatest - least) / 2)).clamp(min=eps).reshape(1)
    middle = 128 if dtype == torch.uint8 else 0
    return scale, torch.full_like(scale, middle)


def _per_token_symmetric(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(dim=-1, keepdim=True)
    scale = (scale.to(torch.float32) if scale.dtype == torch.float16 else scale).clamp(min=1e-5) / 127
    return scale, torch.zeros_like(scale)


def _per_token_affine(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The zero point comes from the end of the range with the smaller error, and is rounded last."""
    least, greatest = RANGES[torch.int8]
    low = x.amin(dim=-1, keepdim=True).clamp(max=0.0)
    high = x.amax(dim=-1, keepdim=True).clamp(min=0.0)
    scale = ((high - low) / float(greatest - least)).clamp(min=torch.finfo(torch.float32).eps)
    lower, upper = low / scale, high / scale
    by_low = (least + lower) + (greatest + upper) > 0
    zero_point = torch.where(by_low, least - lower, greatest - upper).clamp(least, greatest).round()
    return scale, zero_point


def _by_torchao(*given: object) -> tuple[Tensor, Tensor]:
    return torch.ops.torchao.choose_qparams_affine.default(*given)  # decomposes into ATen


CHOOSE: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    f"{_T}choose_qparams.tensor": _per_tensor_affine,
    f"{_T}choose_qparams_symmetric.tensor": _per_tensor_symmetric,
    f"{_T}choose_qparams_per_token": _per_token_symmetric,
    f"{_T}_choose_qparams_per_token_asymmetric_impl": _per_token_affine,
    f"{_T}choose_qparams_per_token_asymmetric": _per_token_affine,
    f"{_A}choose_qparams_affine": _by_torchao,
}


def sizes_of(block: Block) -> str:
    """A short description of a block."""
    if all(b == -1 for b in block):
        return "tensor"
    return "×".join("all" if b == -1 else str(b) for b in block)


def unrecognised(program: ExportedProgram) -> str:
    """The error message for a program in which nothing is quantized."""
    seen = sorted({str(n.target) for n in program.graph.nodes if n.op == "call_function" and not is_erased(n)})
    known = [*QUANTIZE, *DEQUANTIZE, *CHOOSE]
    return (
        f"to_integer: found no quantized operator in the program, which has {', '.join(seen) or 'no operators'}; "
        f"supported are {', '.join(known)}, products of int8 or uint8 codes or of their casts, and operators of hop; "
        "quantize the model before export (hop.nn.convert, torchao's quantize_ or PT2E), or use "
        "hop.export.to_scheme for a float program"
    )
