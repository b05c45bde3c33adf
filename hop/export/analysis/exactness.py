"""check_exact: the nodes of a program whose results may depend on more than their inputs."""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from hop.compat.eager import HigherOrderOperator, OpOverload
from hop.compat.pytree import tree_leaves
from hop.dispatch import operators
from hop.dispatch.operators import ATTENTION, LHS, MEAN, RHS, SCALED
from hop.export.analysis.provenance import LIBRARIES, source_line
from hop.export.rewrite.program import check_program, value
from hop.export.table import table
from hop.numerics import blocks, pooling
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme
from hop.tensor import QuantizedTensor

aten = torch.ops.aten

_ONE_ROUNDING = {  # of each element, as IEEE 754 says
    *("add", "sub", "rsub", "mul", "div", "neg", "abs", "sign", "sgn", "square", "reciprocal", "copysign"),
    *("maximum", "minimum", "fmax", "fmin", "clamp", "clamp_min", "clamp_max", "relu", "relu6", "hardtanh"),
    *("threshold", "leaky_relu", "where", "masked_fill", "floor", "ceil", "round", "trunc", "frac", "fmod"),
    *("nan_to_num", "logical_not", "ldexp", "heaviside"),
}
_CHOICES = {  # elements of the operands, or constants
    *("alias", "amax", "amin", "arange", "as_strided", "cat", "channel_shuffle", "chunk", "clone", "col2im"),
    *("constant_pad_nd", "contiguous", "copy", "cummax", "cummin", "detach", "diagonal", "diag_embed", "dropout"),
    *("embedding", "empty", "empty_like", "expand", "expand_as", "eye", "fill", "flatten", "flip", "full"),
    *("full_like", "gather", "im2col", "index", "index_fill", "index_put", "index_select", "lift_fresh_copy"),
    *("masked_scatter", "masked_select", "max", "max_pool1d", "max_pool2d", "max_pool2d_with_indices", "max_pool3d"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "meshgrid", "min", "movedim", "narrow", "new_empty", "new_full"),
    *("new_ones", "new_zeros", "ones", "ones_like", "pad", "permute", "pixel_shuffle", "pixel_unshuffle"),
    *("reflection_pad1d", "reflection_pad2d", "repeat", "repeat_interleave", "replication_pad1d", "replication_pad2d"),
    *("reshape", "roll", "rot90", "scalar_tensor", "scatter", "select", "select_scatter", "slice", "slice_scatter"),
    *("sort", "split", "split_with_sizes", "squeeze", "stack", "swapaxes", "t", "take_along_dim", "tensor_split"),
    *("tile", "to", "topk", "transpose", "tril", "triu", "type_as", "unbind", "unflatten", "unfold", "unsqueeze"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "view", "view_as", "zeros", "zeros_like"),
    *("_to_copy", "_unsafe_view", "unsafe_split", "unsafe_chunk", "feature_dropout", "alpha_dropout", "hstack"),
    *("mT", "mH", "numpy_T", "matrix_H", "adjoint", "kthvalue", "mode", "vstack", "concat", "concatenate", "ravel"),
    *("access_subclass_inner_tensor",),
}
_PRODUCTS = {
    *("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "mv", "dot", "einsum", "convolution", "bilinear"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
}
_FUNCTIONS = {
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
    *("sinh", "cosh", "tanh", "erf", "erfc", "erfinv", "sigmoid", "log_sigmoid", "gelu", "silu", "mish", "elu"),
    *(
        "selu",
        "celu",
        "softplus",
        "sqrt",
        "rsqrt",
        "pow",
        "hardswish",
        "hardsigmoid",
        "lgamma",
        "digamma",
        "special_erfcx",
    ),
}
_SUMS = {
    *("sum", "mean", "prod", "cumsum", "cumprod", "logsumexp", "var", "std", "var_mean", "std_mean"),
    *("norm", "linalg_vector_norm", "softmax", "_softmax", "log_softmax", "_log_softmax", "layer_norm", "rms_norm"),
    *("native_layer_norm", "group_norm", "native_group_norm", "batch_norm", "instance_norm", "avg_pool1d"),
    *("avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "trace"),
    *(
        "_native_batch_norm_legit_no_training",
        "index_add",
        "scatter_add",
        "scatter_reduce",
        "cdist",
        "cosine_similarity",
    ),
}
_RANDOM = {"rand", "randn", "randint", "bernoulli", "normal", "uniform", "multinomial", "rand_like", "randn_like"}


@dataclass(frozen=True)
class Inexact:
    """A node whose result may depend on the route, the CPU level, the threads or the batch.

    Attributes:
        node: its name.
        operator: what it calls.
        reason: why its result may differ.
        remedy: what to use instead.
        source: the line of the model that it comes from, "" if the program does not say.
    """

    node: str
    operator: str
    reason: str
    remedy: str
    source: str


@dataclass(frozen=True)
class Exactness:
    """The result of hop.export.check_exact.

    Attributes:
        rows: the nodes whose results may differ, in order.
        nodes: how many nodes compute tensors.
    """

    rows: tuple[Inexact, ...]
    nodes: int

    @property
    def exact(self) -> bool:
        """Whether the program gives the same bits on every route."""
        return not self.rows

    def __str__(self) -> str:
        head = f"{self.nodes - len(self.rows):,} of {self.nodes:,} nodes are exact"
        if self.exact:
            return head
        cells = [(r.node, r.operator, r.reason, r.remedy, r.source) for r in self.rows]
        return f"{head}\n{table(('node', 'operator', 'may differ, since', 'use', 'source'), cells, right=5)}"


def check_exact(program: ExportedProgram) -> Exactness:
    """Find the nodes whose results may depend on the route, the CPU level, the number of threads or the batch.

    Exact are: integer arithmetic; operators that round each element once, as IEEE 754 says; those that choose or move
    elements; and operators of hop whose sums are integers or in fixed point. A node with floats that is not known to be
    exact counts as one that may differ.

    Args:
        program: an exported program, before it is lowered.

    Returns:
        An Exactness; `str()` of it is a table.

    Raises:
        TypeError: `program` is no ExportedProgram.
    """
    check_program(program, "check_exact")
    rows: list[Inexact] = []
    count = 0
    for node in _calls(program):
        count += 1
        found = inexact(node)
        if found is not None:
            rows.append(found)
    return Exactness(tuple(rows), count)


def inexact(node: Node) -> Inexact | None:
    """The row of `check_exact` for a node that calls a function; None if it is exact."""
    found = _verdict(node)
    return None if found is None else Inexact(node.name, _shown(node), *found, _source(node))


def _calls(program: ExportedProgram) -> Iterator[Node]:
    """The nodes that compute tensors, those of nested graphs included."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if node.op == "call_function" and node.target is not operator.getitem and _tensors(value(node)):
                yield node


def _source(node: Node) -> str:
    """The line of the model, or the module where a library has the line."""
    line, modules = source_line(node), [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    if modules and modules[-1] and (not line or line.startswith(LIBRARIES)):
        return f"module {modules[-1]}"
    return line


def _tensors(x: object) -> list[Tensor]:
    return [t for t in tree_leaves(x) if isinstance(t, Tensor)]


def _shown(node: Node) -> str:
    target = node.target
    inner = node.args[0] if node.args and isinstance(node.args[0], OpOverload) else None
    return str(target) if inner is None else f"{target}({inner})"


Verdict = tuple[str, str] | None  # the reason and the remedy; None for exact

_QUANTIZE = "an integer scheme, such as hop.quantize_(model, 'int8')"


def _verdict(node: Node) -> Verdict:
    args: list[Any] = [value(x) if isinstance(x, Node) else x for x in node.args]
    kwargs = {k: value(x) if isinstance(x, Node) else x for k, x in node.kwargs.items()}
    if isinstance(node.target, HigherOrderOperator):
        return _of_ours(node.target.name(), args, kwargs)
    name = node.target._schema.name.partition("::")[2] if isinstance(node.target, OpOverload) else str(node.target)
    floats = [t for t in (*_tensors(args), *_tensors(kwargs), *_tensors(value(node))) if t.is_floating_point()]
    if name in _RANDOM:
        return "it is random", "hop.noise, from a key"
    if not floats or not any(t.is_floating_point() for t in _tensors(value(node))):
        return None  # integers, and comparisons
    if name == "stacked":
        return _of_scheme(Scheme.parse(args[5]) if args[5] else None, args[:1])
    return _of_aten(name.removesuffix("_"), args, kwargs)


def _of_aten(name: str, args: list[Any], kwargs: Mapping[str, object]) -> Verdict:
    if name in ("add", "sub", "rsub") and kwargs.get("alpha", args[2] if len(args) > 2 else 1) != 1:
        return "alpha may be multiplied in a fused multiply-add", "a multiplication and an addition"
    if name == "pow" and len(args) > 1 and isinstance(args[1], int | float) and args[1] in (1, 2):
        return None
    if name in ("index_put", "scatter") and (
        any(x is True for x in args[3:]) or kwargs.get("accumulate") or kwargs.get("reduce")
    ):
        return "the order in which elements are added is not defined", "index_select and hop.scaled(sum)"
    if name in ("dropout", "feature_dropout", "alpha_dropout") and args[-1] is True:
        return "it is random", "model.eval()"
    if name in _ONE_ROUNDING or name in _CHOICES:
        return None
    if name in _PRODUCTS:
        if name in ("mm", "bmm", "matmul") and args[0].shape[-1] == 1:
            return None  # one product for each result
        return "the order of a float sum depends on the kernel", _QUANTIZE
    if name == "scaled_dot_product_attention":
        return "the order of a float sum depends on the kernel", "attention='int8'"
    if name in _FUNCTIONS:
        return "the last bit depends on the kernel", _instead(name)
    if name in _SUMS:
        return "the order of a float sum depends on the kernel", _instead(name)
    return "it is not known to be exact", "an operator of hop.scaled"


_KNOWN = {op._schema.name.partition("::")[2] for op in SCALED}


def _instead(name: str) -> str:
    return f"hop.scaled(aten.{name}), or exact=True of hop.quantize_" if name in _KNOWN else "an operator of hop.scaled"


def _of_ours(name: str, args: list[Any], kwargs: Mapping[str, object]) -> Verdict:
    if name in ("hop_quantize", "hop_fake_quantize", "hop_quantize_buffers"):
        q = Quantizer.parse(args[0])
        shared = _shares_rows(q, _tensors(args))
        return (f"{q} has one scale for several rows, so that it depends on the batch", _BY_ROW) if shared else None
    if name == "hop_quantized":
        return _of_quantized(args)
    if name == "hop_scaled":
        return _of_scaled(args)
    if name == "hop_out_dtype":
        op, floats = args[0], any(t.is_floating_point() for t in _tensors(args))
        family = operators.of(op).family
        if floats and (family.is_linear or (op in SCALED and not family.moves)):
            return "the order of a float sum depends on the kernel", "integer operands"
    return None


_BY_ROW = "a scale for each row, as hop.presets.INT8_ROW has"


def _shares_rows(q: Quantizer, given: list[Tensor]) -> bool:
    """Whether rows share a scale that is found in the call."""
    if q.scale.is_static or not given or given[0].dim() < 2:
        return False
    outer = q.scale.outer_block
    sizes = [blocks.per_dimension(block, given[0].dim())[0] for block in (q.block, outer) if block is not None]
    return q.flat or any(size != 1 for size in sizes)


def _of_quantized(args: list[Any]) -> Verdict:
    if operators.of(args[0]).family is operators.EMBEDDING:
        return None
    return _of_scheme(Scheme.parse(args[1]), [x for x in args[2:] if isinstance(x, Tensor)])


def _of_scheme(scheme: Scheme | None, operands: list[Tensor]) -> Verdict:
    """The verdict on a product in a scheme; None for floats."""
    q = None if scheme is None else scheme.lhs
    rhs = None if scheme is None else scheme.rhs
    if q is None or not q.format.is_integer or (rhs is not None and not rhs.format.is_integer):
        return "floats are summed in the order of the kernel", _QUANTIZE
    if _shares_rows(q, operands):
        return f"{q} has one scale for several rows, so that it depends on the batch", _BY_ROW
    return None


def _of_scaled(args: list[Any]) -> Verdict:
    op, given = args[0], args[4:]
    row = operators.of(op)
    if row.product is not None or row.family is ATTENTION:
        roles = (LHS, RHS) if row.product is not None else ("other",)
        factors = [x for i, x in enumerate(given) if row.role(i) in roles and isinstance(x, Tensor)]
        if not all(isinstance(x, QuantizedTensor) and x.quantizer.format.is_integer for x in factors):
            return "floats are summed in the order of the kernel", _QUANTIZE
        return None
    plain = [x for x in _tensors(given) if not isinstance(x, QuantizedTensor)]
    if any(x.dtype == torch.float64 for x in plain):
        return "float64 is computed by PyTorch's own kernels", "float32"
    if row.family is MEAN and row.spatial and not pooling.has_order(op, given[1:], given[0].shape[-row.spatial :]):
        return "windows of open sizes are summed in the order of the kernel", "fixed sizes of images"
    return None
