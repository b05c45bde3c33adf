"""Programs as ONNX models whose integers are those of the program.

A program is lowered to core ATen, but for its products of integers, which become two operators of this module,

    hop_onnx::matmul(a, b, a_zero_point, b_zero_point) -> int32         ONNX MatMulInteger
    hop_onnx::convolution(x, w, x_zero_point, w_zero_point, ...) -> int32     ONNX ConvInteger

on codes of 8 bits with at most one zero point each. Such a program still runs in PyTorch; torch.onnx translates it.

    lowered       products of codes less their zero points, of 8 or 16 bits
    _in_bytes     the same products, of 8-bit codes alone
    to_onnx       the ONNX model; constant codes of 4 bits are stored as INT4
"""

import copy
import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import Graph, Node

from hop import _compile
from hop._hop import decompositions
from hop.export.program import emit, graph_of, rebuilt, value
from hop.impls.out_dtype import meaning
from hop.impls.out_dtype import operator as out_dtype
from hop.impls.out_dtype.forms import as_convolution, as_product
from hop.kernels.convolution import Convolution, as_plain

if TYPE_CHECKING:
    from torch.onnx import ONNXProgram

aten = torch.ops.aten
_BYTES = (torch.int8, torch.uint8)
_CODES = (*_BYTES, torch.int16)
_INT4 = "_int4"  # ends the names of constants that ONNX holds in 4 bits
_OPSET = 21  # the first that has INT4
_SMALL = 1024  # elements up to which constants are computed when a program is exported
_SAFE = 64  # 2 · 255 · 64 is an int16

# ---- the products, as operators

_library = torch.library.Library("hop_onnx", "DEF")
_library.define("matmul(Tensor a, Tensor b, Tensor? a_zero_point, Tensor? b_zero_point) -> Tensor")
_library.define(
    "convolution(Tensor x, Tensor w, Tensor? x_zero_point, Tensor? w_zero_point, int[] strides, int[] pads, "
    "int[] dilations, int group) -> Tensor"
)
_library.define("floor_divide(Tensor a, Tensor b) -> Tensor")


def _less(x: Tensor, zero_point: Tensor | None, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if zero_point is None else x.to(dtype) - zero_point.to(dtype)


def _matmul(a: Tensor, b: Tensor, a_zero_point: Tensor | None, b_zero_point: Tensor | None) -> Tensor:
    return torch.matmul(_less(a, a_zero_point, torch.int32), _less(b, b_zero_point, torch.int32))


def _convolution(
    x: Tensor,
    w: Tensor,
    x_zero_point: Tensor | None,
    w_zero_point: Tensor | None,
    strides: list[int],
    pads: list[int],
    dilations: list[int],
    group: int,
) -> Tensor:
    wide = torch.float64  # exact: products of bytes are below 2^16
    x, w = _less(x, x_zero_point, wide), _less(w, w_zero_point, wide)
    n = x.dim() - 2
    sides = [p for d in reversed(range(n)) for p in (pads[d], pads[n + d])]
    x = torch.nn.functional.pad(x, sides)
    zeros = [0] * n
    y = aten.convolution.default(x, w, None, strides, zeros, dilations, False, zeros, group)
    return y.to(torch.int64).to(torch.int32).contiguous()


def _floor_divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="floor")


for _name, _function in (("matmul", _matmul), ("convolution", _convolution), ("floor_divide", _floor_divide)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hop_onnx::{_name}", _function, lib=_library)

_MATMUL, _CONVOLUTION = torch.ops.hop_onnx.matmul.default, torch.ops.hop_onnx.convolution.default
_FLOOR_DIVIDE = torch.ops.hop_onnx.floor_divide.default


# ---- from out_dtype to the products


def _product(op: Any, dtype: torch.dtype, /, *args: Any, **kwargs: Any) -> Tensor:
    """out_dtype(op, dtype, *args): one of our products if it is one of integers, else what it means."""
    found = None
    if dtype == torch.int32:
        found = _as_matmul(op, args, kwargs)
        if found is None and not kwargs:
            found = _as_convolution(op, args)
    return meaning.reference(op, dtype, *args, **kwargs) if found is None else found


def _are_codes(*operands: Any) -> bool:
    return all(isinstance(x, Tensor) and x.dtype in _CODES for x in operands)


def _as_matmul(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    if op is aten.linear.default and _are_codes(*args[:2]) and args[0].dim() > 1 and args[1].dim() == 2:
        x, weight = args[:2]
        bias = args[2] if len(args) > 2 else None
        y = _MATMUL(x, weight.permute(1, 0), None, None)  # of any number of dimensions, unlike aten.mm
        return y if bias is None else y + bias.to(torch.int32)
    product = as_product(op, args, kwargs)
    if product is None or not _are_codes(product.lhs, product.rhs):
        return None
    return product.complete(_MATMUL(product.lhs, product.rhs, None, None))


def _as_convolution(op: Any, args: tuple[Any, ...]) -> Tensor | None:
    if len(args) < 2 or not _are_codes(*args[:2]):
        return None
    pads = None
    if len(args) > 4 and isinstance(args[4], str):  # conv2d.padding
        op, args, pads = _with_numbers(op, args)
    found = as_convolution(op, args)
    if found is None:
        return None
    conv = as_plain(found.conv) if found.conv.transposed else found.conv
    y = _CONVOLUTION(*conv[:2], None, None, list(conv.stride), pads or _both(conv), list(conv.dilation), conv.groups)
    if found.bias is not None:
        y = y + found.bias.to(torch.int32).view(-1, *[1] * len(conv.stride))
    return y.squeeze(0) if found.unbatched else y


def _both(conv: Convolution) -> list[int]:
    return [*conv.padding, *conv.padding]


def _with_numbers(op: Any, args: Any) -> tuple[Any, tuple[Any, ...], list[int]]:
    """A convolution whose padding is "same" or "valid", without padding, and the padding of both ends."""
    kernel = args[1].shape[2:]
    dilation = args[5] if len(args) > 5 else 1
    dilation = (
        [dilation] * len(kernel) if isinstance(dilation, int) else list(dilation) * (len(kernel) // len(dilation))
    )
    total = [d * (int(k) - 1) if args[4] == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
    start = [t // 2 for t in total]
    plain = op.overloadpacket.default
    return plain, (*args[:4], 0, *args[5:]), [*start, *(t - s for t, s in zip(total, start, strict=True))]


# ---- from products of codes less their zero points to products of bytes


class _Constants:
    """The values in a graph that its parameters, buffers and constants alone determine; and new ones."""

    def __init__(self, program: ExportedProgram, graph: Graph) -> None:
        own, signature = {**program.constants, **program.state_dict}, program.graph_signature
        changed = set(signature.buffers_to_mutate.values())
        held = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        given = {
            spec.arg.name: own[spec.target].detach()
            for spec in signature.input_specs
            if spec.kind in held and spec.target in own and spec.target not in changed
        }
        self.values = {node: given[node.name] for node in graph.find_nodes(op="placeholder") if node.name in given}
        self.constant = set(self.values)
        for node in graph.nodes:
            is_operator = node.op == "call_function" and isinstance(node.target, _compile.OpOverload)
            if is_operator and all(x in self.constant for x in node.all_input_nodes):
                self.constant.add(node)
        self.graph = graph
        self.specs = list(signature.input_specs)
        self.place = sum(spec.kind != InputKind.USER_INPUT for spec in self.specs)
        self.made: dict[str, Tensor] = {}
        self.mode = next(n.meta["val"].fake_mode for n in graph.nodes if isinstance(n.meta.get("val"), Tensor))

    def find(self, node: Node) -> Tensor | None:
        """The value of a node, None if it depends on an input."""
        if node not in self.constant:
            return None
        if node not in self.values:
            found = {x: self.find(x) for x in node.all_input_nodes}
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda x: found[x])
            self.values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self.values[node]

    def add(self, name: str, x: Tensor) -> Node:
        """A new constant of the program."""
        x = x.detach().contiguous()
        name = f"{name}_{len(self.made)}"
        if x.dtype == torch.int8 and x.numel() and int(x.min()) >= -8 and int(x.max()) <= 7:
            name += _INT4
        inputs = self.graph.find_nodes(op="placeholder")
        after = inputs[self.place - 1] if self.place else None
        where = (
            self.graph.inserting_after(after) if after else self.graph.inserting_before(next(iter(self.graph.nodes)))
        )
        with where:
            node = self.graph.placeholder(name)
        node.meta["val"] = self.mode.from_tensor(x, static_shapes=True)
        self.specs.insert(self.place, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), node.name))
        self.place += 1
        self.made[node.name] = x
        self.values[node] = x
        self.constant.add(node)
        return node


class _Factor(NamedTuple):
    """A factor of a product: views of codes - zero_point."""

    codes: Node  # of 8 bits; of 9 bits and a sign, in int16, if `zero_point` is None
    zero_point: Node | int | None = None
    views: Sequence[tuple[Any, Sequence[Any]]] = ()  # operators and their other arguments, one after the other
    signed: bool = False  # whether int8 stays int8


class _Term(NamedTuple):
    """sign · (codes - zero_point - rows), codes of 8 bits."""

    codes: Tensor
    zero_point: Tensor | None = None  # in their dtype, of shape (1,)
    rows: Tensor | None = None  # int32, of one column
    sign: int = 1


def _in_bytes(program: ExportedProgram, weights: torch.dtype) -> ExportedProgram:
    """The program with products of bytes."""
    graph = graph_of(program)
    constants = _Constants(program, graph)
    for target in (_MATMUL, _CONVOLUTION):
        for node in graph.find_nodes(op="call_function", target=target):
            a, b, _, _, *rest = node.args
            is_matmul = target is _MATMUL
            lhs = _factor(constants, a, rows=is_matmul)
            rhs = _factor(constants, b, signed=is_matmul and weights == torch.int8, safe=is_matmul)
            if lhs is None or rhs is None:
                if not is_matmul:
                    raise NotImplementedError(
                        f"to_onnx: {node.name} is a convolution of {a.meta['val'].dtype} and {b.meta['val'].dtype}; "
                        "ONNX has integer convolutions of int8 and uint8 alone: give it codes of 8 bits"
                    )
                made = emit(node, lambda x, y: _matmul(x, y, None, None), a, b)
            else:
                made = emit(node, functools.partial(_products, target, rest), tuple(lhs), tuple(rhs))
            node.replace_all_uses_with(made)
            graph.erase_node(node)
    _replace_others(graph)
    graph.eliminate_dead_code()
    signature = ExportGraphSignature(constants.specs, copy.deepcopy(program.graph_signature.output_specs))
    return rebuilt(program, graph, signature, constants={**program.constants, **constants.made})


def _factor(
    constants: _Constants, node: Any, *, signed: bool = False, safe: bool = False, rows: bool = False
) -> _Factor | None:
    """What is multiplied, None if it has more than 9 bits. A constant stays int8 if `signed`, or if small and `safe`
    says that sums of two of its products with a byte may have 16 bits; else it becomes uint8."""
    if (x := constants.find(node)) is not None and x.numel():
        low, high, name = int(x.min()), int(x.max()), f"{_source(node)}_codes"
        if low >= -128 and high <= 127 and (signed or (safe and max(-low, high) <= _SAFE)):
            return _Factor(constants.add(name, x.to(torch.int8)), None, (), True)
        zero = 128 if low >= -128 and high <= 127 else max(-low, 0)
        if zero <= 255 and high + zero <= 255:
            return _Factor(constants.add(name, (x.to(torch.int16) + zero).to(torch.uint8)), zero)
        return _Factor(node) if low >= -255 and high <= 255 else None
    if node.meta["val"].dtype in _BYTES:
        return _Factor(node, None, (), signed)
    return _difference(node, rows)


def _source(node: Node) -> str:
    """The placeholder that a constant comes from."""
    while node.op != "placeholder" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.name


_VIEWS = frozenset(
    {
        *(aten.view.default, aten.slice.Tensor, aten.permute.default, aten.expand.default, aten.unsqueeze.default),
        *(aten.squeeze.dims, aten.clone.default),
    }
)


def _difference(whole: Node, rows: bool) -> _Factor | None:
    """Codes of 8 bits less their zero point, if `whole` is that. Zero points other than one, or, if `rows` says so, one
    for each row, stay subtracted."""
    views: list[tuple[Any, Sequence[Any]]] = []
    node: Any = whole
    while node.target in _VIEWS:
        views.insert(0, (node.target, node.args[1:]))
        node = node.args[0]
    if node.target not in (aten.sub.Tensor, aten.sub.Scalar) or node.kwargs or len(node.args) > 2:
        return None
    codes, zero = (_before_cast(x) for x in node.args)
    if not isinstance(codes, Node) or codes.meta["val"].dtype not in _BYTES:
        return None
    if not isinstance(zero, Node):
        return _Factor(codes, int(zero), views)
    z = zero.meta["val"]
    if z.dtype not in _BYTES:
        return None
    by_row = rows and z.dim() == codes.meta["val"].dim() and _compile.known_equal(z.shape[-1], 1)
    along = all(target is aten.slice.Tensor and args[0] in (-1, z.dim() - 1) for target, args in views)
    return _Factor(codes, zero, views) if _is_one(z) or (by_row and along) else _Factor(whole)


def _is_one(x: Tensor) -> bool:
    return all(_compile.known_equal(n, 1) for n in x.shape)


def _before_cast(x: Any) -> Any:
    """What codes were before they were cast to 16 bits."""
    if isinstance(x, Node) and x.target is aten._to_copy.default and x.meta["val"].dtype == torch.int16:
        source: Any = x.args[0]
        return source if source.meta["val"].dtype in _BYTES else x
    return x


def _products(target: Any, rest: Sequence[Any], lhs: Any, rhs: Any) -> Tensor:
    """The sum of the products of the terms of two factors."""
    total: Tensor | int = 0
    for a, b in itertools.product(_terms(*lhs), _terms(*rhs)):
        term = target(a.codes, b.codes, a.zero_point, b.zero_point, *rest)
        if a.rows is not None:
            columns = _less(b.codes, b.zero_point, torch.int32).sum(-2, keepdim=True, dtype=torch.int32)
            term = term - a.rows * columns
        if a.sign * b.sign < 0:
            total = total - term
        else:
            total = term if isinstance(total, int) else total + term
    assert isinstance(total, Tensor)
    return total


def _terms(codes: Tensor, zero_point: Any, views: Any, signed: bool) -> list[_Term]:
    """A factor as the sum of at most two terms. onnxruntime has no fast kernel for signed codes on the left on most
    CPUs, so that they move by 128."""
    for view, args in views:
        codes = view(codes, *args)
    if codes.dtype == torch.int16:
        wide = codes.to(torch.int32)
        positive, negative = (x.clamp(0, 255).to(torch.uint8) for x in (wide, wide * -1))
        return [_Term(positive), _Term(negative, sign=-1)]
    rows = None
    if isinstance(zero_point, Tensor):
        zero_point = zero_point.to(torch.int32)
        if not _is_one(zero_point):
            rows, zero_point = zero_point, None
    if codes.dtype == torch.int8 and not signed:
        codes = codes.to(torch.uint8).bitwise_xor(128)
        zero_point = 128 if zero_point is None else zero_point + 128
    if isinstance(zero_point, int):
        zero_point = aten.full.default([1], zero_point, dtype=codes.dtype)
    elif zero_point is not None:
        zero_point = zero_point.reshape(1).to(codes.dtype)
    return [_Term(codes, zero_point, rows)]


# ---- what torch.onnx or onnxruntime compute otherwise, or not at all

_MAXIMA = frozenset({aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default})
_MEANS = {aten.avg_pool1d.default: 1, aten.avg_pool2d.default: 2, aten.avg_pool3d.default: 3}


def _replace_others(graph: Graph) -> None:
    for node in list(graph.nodes):
        made = _replacement(node)
        if made is not None:
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def _replacement(node: Any) -> Node | None:
    x: Any = node.args[0] if node.args else None
    integer = isinstance(v := value(x), Tensor) and not v.is_floating_point()
    if node.target is aten.div.Tensor_mode and node.kwargs["rounding_mode"] == "floor" and integer:
        return emit(node, _floor_divided, *node.args)  # torch.onnx divides float32
    is_maximum = node.target is operator.getitem and x.target in _MAXIMA and node.args[1] == 0
    if is_maximum and not value(x.args[0]).is_floating_point():  # ONNX takes that of floats and bytes alone
        return emit(node, functools.partial(_maximum, x.target), *x.args)
    if node.target in _MEANS and value(x).dtype == torch.float64:
        return emit(node, functools.partial(_mean, _MEANS[node.target]), *node.args)
    return None


def _floor_divided(a: Tensor, b: Any) -> Tensor:
    return _FLOOR_DIVIDE(a, b if isinstance(b, Tensor) else aten.full.default([1], b, dtype=a.dtype))


def _maximum(op: Any, x: Tensor, *args: Any) -> Tensor:
    return op(x.to(torch.float64), *args)[0].to(x.dtype)


def _mean(
    n: int,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Tensor:
    """Average pooling in the order in which PyTorch sums, of slices: onnxruntime pools float32 alone."""
    if ceil_mode:
        raise NotImplementedError("to_onnx: average pooling of integers with ceil_mode=True has no form in ONNX")
    kernel, stride, padding = ([*v] * (n // len(v)) for v in (kernel, stride or kernel, padding))
    pads = [p for size in reversed(padding) for p in (size, size)]

    def summed(x: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x, pads) if any(pads) else x
        total = None
        for offset in itertools.product(*map(range, kernel)):
            part = x
            for dim, (start, k, step) in enumerate(zip(offset, kernel, stride, strict=True), start=x.dim() - n):
                end = start + x.shape[dim] - (k - 1)
                part = aten.slice.Tensor(part, dim, start, end, step)
            total = part if total is None else total + part
        assert total is not None
        return total

    if divisor is not None or count_include_pad:
        return summed(x) / (divisor or math.prod(kernel))
    return summed(x) / summed(torch.ones_like(x))


# ---- from the program to ONNX


def to_onnx(program: ExportedProgram, *, weights: torch.dtype = torch.uint8, **options: Any) -> "ONNXProgram":
    """An exported program as an ONNX model, with the same integers.

    Products of integers become MatMulInteger and ConvInteger on codes of 8 bits, and everything else what core ATen is
    in ONNX. Constant codes are stored in bytes, those of 4 bits in products of matrices as INT4.

    Args:
        program: an exported program, with operators of this library or without.
        weights: how the right factor of a matrix product is held where it is a constant of codes beyond -64 to 64:
            torch.uint8, which onnxruntime multiplies exactly on every CPU; or torch.int8, which it multiplies faster,
            but on x86 CPUs without VNNI wrongly: there it saturates sums of two products at 16 bits.
        options: more arguments of torch.onnx.export, such as `input_names`, `output_names` or `opset_version` (21, the
            first that has INT4). Dynamic shapes are those of the program.

    Returns:
        A torch.onnx.ONNXProgram: `save` writes it to a file, `model_proto` is the model.

    Raises:
        ImportError: onnx or onnxscript is missing.
        TypeError: `program` is no ExportedProgram.
        ValueError: `weights` is another dtype.
        NotImplementedError: the program has a convolution of 16-bit integers, or average pooling of integers with
            ceil_mode, which ONNX has not.
    """
    if not isinstance(program, ExportedProgram):
        raise TypeError(
            f"to_onnx: program must be a torch.export.ExportedProgram, as torch.export.export gives it; got a "
            f"{type(program).__name__}"
        )
    if weights not in _BYTES:
        raise ValueError(f"to_onnx: weights must be torch.uint8 or torch.int8, got {weights}")
    try:
        import onnxscript.optimizer
    except ImportError as error:
        raise ImportError("to_onnx needs onnx and onnxscript: pip install 'torch-hop[onnx]'") from error
    table = decompositions()
    table[out_dtype] = _compile.as_decomposition(_product)
    lowered = _in_bytes(program.run_decompositions(table), weights)
    translations = {_MATMUL: _onnx_matmul, _CONVOLUTION: _onnx_convolution, _FLOOR_DIVIDE: _onnx_floor_divide}
    made = torch.onnx.export(
        lowered,
        dynamo=True,
        optimize=False,
        custom_translation_table={**translations, **(options.pop("custom_translation_table", None) or {})},
        **{"verbose": False, "opset_version": _OPSET, **options},
    )
    assert made is not None
    # Constants as large as weights are left for when the model is loaded: decoded, they are many times as large.
    onnxscript.optimizer.optimize_ir(made.model, input_size_limit=_SMALL, output_size_limit=_SMALL)
    _widen(made.model)
    _pack(made.model)
    return made


_OF_ANY_TYPE = frozenset(
    "Cast CastLike Constant Flatten Identity Reshape Shape Size Squeeze Transpose Unsqueeze".split()
)


def _widen(model: Any) -> None:
    """Let operators that onnxruntime has for wider types alone run on those, between casts: of 16-bit integers on 32
    bits, of 8-bit floats on float32."""
    import onnx_ir as ir

    kinds = ir.DataType
    wide = {kinds.INT16: kinds.INT32, kinds.FLOAT8E4M3FN: kinds.FLOAT, kinds.FLOAT8E5M2: kinds.FLOAT}

    def cast(x: Any, dtype: Any, name: str) -> Any:
        made = ir.node("Cast", [x], {"to": dtype})
        made.outputs[0].name, made.outputs[0].shape, made.outputs[0].dtype = name, x.shape, dtype
        return made

    for node in list(model.graph):
        if node.op_type in _OF_ANY_TYPE:
            continue
        for i, x in enumerate(node.inputs):
            if x is not None and x.dtype in wide:
                made = cast(x, wide[x.dtype], f"{x.name}_wide_{node.name}_{i}")
                model.graph.insert_before(node, made)
                node.replace_input_with(i, made.outputs[0])
        for y in node.outputs:
            if y.dtype in wide:
                readers, narrow, name = list(y.uses()), y.dtype, y.name
                y.name, y.dtype = f"{name}_wide", wide[narrow]
                made = cast(y, narrow, name)
                model.graph.insert_after(node, made)
                for reader, i in readers:
                    reader.replace_input_with(i, made.outputs[0])
                for i, output in enumerate(model.graph.outputs):
                    if output is y:
                        model.graph.outputs[i] = made.outputs[0]


def _pack(model: Any) -> None:
    """Store constants of 4 bits in 4 bits."""
    import ml_dtypes
    import onnx_ir as ir

    for name, held in list(model.graph.initializers.items()):
        if not name.endswith(_INT4):
            continue
        tensor = ir.tensor(held.const_value.numpy().astype(ml_dtypes.int4), name=name)
        packed = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=held.shape, const_value=tensor)
        cast = ir.node("Cast", [packed], {"to": ir.DataType.INT8})
        cast.outputs[0].name, cast.outputs[0].type, cast.outputs[0].shape = f"{name}_int8", held.type, held.shape
        held.replace_all_uses_with(cast.outputs[0])
        del model.graph.initializers[name]
        model.graph.register_initializer(packed)
        model.graph.insert_before(model.graph[0], cast)


def _operators() -> Any:
    """Those of ONNX, which are recorded when they are called."""
    from onnxscript import opset21

    return opset21


def _onnx_matmul(a: Any, b: Any, a_zero_point: Any, b_zero_point: Any) -> Any:
    op = _operators()
    return op.MatMulInteger(a, b, a_zero_point, b_zero_point)


def _onnx_floor_divide(a: Any, b: Any) -> Any:
    op = _operators()
    return op.Div(op.Sub(a, op.Mod(a, b)), b)


def _onnx_convolution(
    x: Any,
    w: Any,
    x_zero_point: Any,
    w_zero_point: Any,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    group: int,
) -> Any:
    op = _operators()
    return op.ConvInteger(
        x, w, x_zero_point, w_zero_point, strides=strides, pads=pads, dilations=dilations, group=group
    )
