"""to_onnx, and the passes on its ONNX model."""

import contextlib
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram

from hop.compat.export import as_decomposition
from hop.export.rewrite.numbers import float64_numbers_as_constants
from hop.export.rewrite.program import check_program
from hop.export.targets.integer.constants import INT4
from hop.export.targets.onnx.factors import in_bytes
from hop.export.targets.onnx.operators import BYTES, CONVOLUTION, FLOOR_DIVIDE, MATMUL
from hop.export.targets.onnx.products import product
from hop.export.targets.onnx.signed import choose_signed
from hop.impls.decompositions import decompositions
from hop.impls.out_dtype import out_dtype_operator as out_dtype
from hop.numerics import functions

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch.onnx import ONNXProgram

_OPSET = 21  # the first that has INT4
_SMALL = 1024  # constants with at most this many elements are folded at export


def to_onnx(
    program: ExportedProgram, *, weights: torch.dtype | None = None, exact: bool = False, **options: Any
) -> "ONNXProgram":
    """Convert an exported program to an ONNX model with the same integers.

    Integer products become MatMulInteger and ConvInteger on 8-bit codes; everything else is translated from core ATen.
    Constant codes are stored in bytes, 4-bit codes of matrix products as INT4.

    Args:
        program: an exported program, with or without operators of this library.
        weights: the dtype of the right factor of a matrix product if it is a constant with codes outside -64 to 64.
            torch.uint8 is exact in onnxruntime on every CPU. torch.int8 is faster, but wrong on x86 CPUs without VNNI,
            where onnxruntime saturates sums of two products at 16 bits. By default the model uses int8 if a test
            product, computed when the model is loaded, is exact, and uint8 otherwise.
        exact: whether to use our implementations of float functions, norms and softmax: correctly rounded and summed in
            fixed point, with the bits of eager mode, in some dozens of operators each. By default the runtime's
            operators compute them; their last bits differ, and so does an occasional code quantized from them.
            Functions of 8-bit codes with one scale are tables of 256 codes, equal in either case.
        options: further arguments of torch.onnx.export, such as `input_names`, `output_names` or `opset_version` (21,
            the first with INT4). Dynamic shapes are those of the program.

    Returns:
        A torch.onnx.ONNXProgram: `save` writes it to a file, `model_proto` is the model.

    Raises:
        ImportError: onnx or onnxscript is not installed.
        TypeError: `program` is not an ExportedProgram.
        ValueError: `weights` is another dtype.
        NotImplementedError: the program has a convolution of 16-bit integers, or average pooling of integers with
            ceil_mode, which ONNX does not have.
    """
    check_program(program, "to_onnx")
    if weights is not None and weights not in BYTES:
        raise ValueError(f"to_onnx: weights must be None, torch.uint8 or torch.int8, got {weights!r}; take one of them")
    try:
        from onnxscript import optimizer
    except ImportError as error:
        raise ImportError("to_onnx needs onnx and onnxscript: pip install 'torch-hop[onnx]'") from error
    table = decompositions()
    table[out_dtype] = as_decomposition(product)
    with contextlib.nullcontext() if exact else functions.of_runtime():
        lowered = program.run_decompositions(table)
    lowered = in_bytes(float64_numbers_as_constants(lowered), weights or torch.uint8)
    translations: dict[Any, Any] = {
        MATMUL: _onnx_matmul,
        CONVOLUTION: _onnx_convolution,
        FLOOR_DIVIDE: _onnx_floor_divide,
    }
    translations |= options.pop("custom_translation_table", None) or {}
    options = {"verbose": False, "opset_version": _OPSET, **options}
    result = torch.onnx.export(lowered, dynamo=True, optimize=False, custom_translation_table=translations, **options)
    assert result is not None
    _simplify(result.model, optimizer)
    _widen(result.model)
    _pack(result.model)
    if weights is None:
        choose_signed(result.model)
    return result


def _simplify(model: "ir.Model", optimizer: ModuleType) -> None:
    """Fold constants and clean up.

    onnxscript's `optimize_ir` would also drop factors within 10^-5 of 1, and terms below 10^-8. Constants as large as
    weights are folded when the model is loaded instead, because decoded they are many times larger.
    """
    from onnx_ir.passes import common

    common.InlinePass()(model)
    for _ in range(2):
        optimizer.fold_constants_ir(model, onnx_shape_inference=True, input_size_limit=_SMALL, output_size_limit=_SMALL)
        common.RemoveUnusedNodesPass()(model)
    for cleaning in (
        common.RemoveUnusedFunctionsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    ):
        cleaning(model)


_ANY_TYPE = frozenset("Cast CastLike Constant Flatten Identity Reshape Shape Size Squeeze Transpose Unsqueeze".split())


def _widen(model: "ir.Model") -> None:
    """Insert casts around operators that onnxruntime only has for wider types: 16-bit integers to 32 bits, 8-bit floats
    to float32.
    """
    import onnx_ir as ir

    kinds = ir.DataType
    wide: dict[ir.DataType | None, ir.DataType] = {
        kinds.INT16: kinds.INT32,
        kinds.FLOAT8E4M3FN: kinds.FLOAT,
        kinds.FLOAT8E5M2: kinds.FLOAT,
    }

    def cast(x: ir.Value, dtype: ir.DataType, name: str | None) -> ir.Node:
        result = ir.node("Cast", [x], {"to": dtype})
        result.outputs[0].name, result.outputs[0].shape, result.outputs[0].dtype = name, x.shape, dtype
        return result

    for node in list(model.graph):
        if node.op_type in _ANY_TYPE:
            continue
        for i, x in enumerate(node.inputs):
            if x is not None and x.dtype in wide:
                result = cast(x, wide[x.dtype], f"{x.name}_wide_{node.name}_{i}")
                model.graph.insert_before(node, result)
                node.replace_input_with(i, result.outputs[0])
        for y in node.outputs:
            if y.dtype is not None and y.dtype in wide:
                readers, narrow, name = list(y.uses()), y.dtype, y.name
                y.name, y.dtype = f"{name}_wide", wide[narrow]
                result = cast(y, narrow, name)
                model.graph.insert_after(node, result)
                for reader, i in readers:
                    reader.replace_input_with(i, result.outputs[0])
                for i, output in enumerate(model.graph.outputs):
                    if output is y:
                        model.graph.outputs[i] = result.outputs[0]


def _pack(model: "ir.Model") -> None:
    """Store constants of 4-bit codes in 4 bits."""
    import ml_dtypes
    import onnx_ir as ir

    for name, initializer in list(model.graph.initializers.items()):
        if not name.endswith(INT4):
            continue
        assert initializer.const_value is not None
        tensor = ir.tensor(initializer.const_value.numpy().astype(ml_dtypes.int4), name=name)
        packed = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=initializer.shape, const_value=tensor)
        cast = ir.node("Cast", [packed], {"to": ir.DataType.INT8})
        cast.outputs[0].name, cast.outputs[0].type, cast.outputs[0].shape = (
            f"{name}_int8",
            initializer.type,
            initializer.shape,
        )
        initializer.replace_all_uses_with(cast.outputs[0])
        del model.graph.initializers[name]
        model.graph.register_initializer(packed)
        model.graph.insert_before(model.graph[0], cast)


def _operators() -> Any:
    """ONNX's operators, which record their calls."""
    from onnxscript import opset21

    return opset21


def _onnx_matmul(a: object, b: object, a_zero_point: object, b_zero_point: object) -> object:
    op = _operators()
    return op.MatMulInteger(a, b, a_zero_point, b_zero_point)


def _onnx_floor_divide(a: object, b: object) -> object:
    op = _operators()
    return op.Div(op.Sub(a, op.Mod(a, b)), b)


def _onnx_convolution(
    x: object,
    w: object,
    x_zero_point: object,
    w_zero_point: object,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    group: int,
) -> object:
    op = _operators()
    return op.ConvInteger(
        x, w, x_zero_point, w_zero_point, strides=strides, pads=pads, dilations=dilations, group=group
    )
