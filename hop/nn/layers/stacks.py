"""Grouped products, as in mixtures of experts: rows sorted by group times the matrix of their group.

`chain` computes, for the rows of group i, hop.quantized of these rows and matrix i of each stack. Rows are quantized
all at once where that gives the same bits. The number of rows per group is data, so in traced programs each product is
one operator,

    hop::stacked(x, rows, ends, weight, bias, scheme, quantizer, shape, columns) -> tensor

where `weight` lists the buffers of a quantized weight, or a single float tensor if `quantizer` is "".
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hop.compat import eager
from hop.dispatch.kernel import Declined
from hop.impls.explain import EXPLAINED
from hop.impls.quantize import quantize
from hop.impls.quantized import quantized
from hop.kernels.gpu import product as gpu
from hop.nn.layers import stack_kernels as kernels
from hop.nn.layers.stack_kernels import Groups, Stack
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme
from hop.tensor import QuantizedTensor

aten = torch.ops.aten


def chain(
    x: Tensor,
    rows: Tensor,
    ends: Tensor,
    stacks: Sequence[Stack],
    between: Callable[[Tensor], Tensor],
    scheme: Scheme | None,
    columns: bool,
) -> Tensor:
    """Multiply each row with the matrix of its group, for one stack after the other.

    Args:
        x: (T, K), float.
        rows: int64 (S,): the row of x for each row of the product. Sorted by group.
        ends: int64 (E,): the end of each group. Rows after the last end are in no group; their results are zeros.
        stacks: the matrices and biases of each product.
        between: a function applied row by row between two products.
        scheme: how products are computed; None for floats.
        columns: whether products sum over the first dimension of each matrix.

    Returns:
        (S, R), in x's dtype.
    """
    plainly = not torch.compiler.is_compiling() and eager.is_plain_eager()
    if plainly and not _trains_on_gpu(x, stacks, scheme, columns):
        return _products(x, rows, ends, stacks, between, scheme, columns)
    text = "" if scheme is None else str(scheme)
    for i, (weight, bias) in enumerate(stacks):
        is_quantized = isinstance(weight, QuantizedTensor)
        parts = [getattr(weight, name) for name in weight._names] if is_quantized else [weight]
        said, shape = str(weight.quantizer) if is_quantized else "", list(weight.shape)
        given = (between(x), None) if i else (x, rows)
        x = torch.ops.hop.stacked(*given, ends, parts, bias, text, said, shape, columns)
    return x


def _trains_on_gpu(x: Tensor, stacks: Sequence[Stack], scheme: Scheme | None, columns: bool) -> bool:
    """Whether gradients will be needed and grouped GPU kernels can compute them."""
    if not (gpu.takes(x) and gpu.is_hopper(x.device) and _is_recorded(x, stacks)) or eager.is_forward_ad_active():
        return False
    weights = [weight for weight, _ in stacks]
    if any(isinstance(w, QuantizedTensor) and w.requires_grad for w in weights):
        return False
    return all(map(functools.partial(_has_gradients, x, scheme, columns), weights))


def _has_gradients(x: Tensor, scheme: Scheme | None, columns: bool, weight: Tensor) -> bool:
    try:
        kernels.check_gradients(x, weight, scheme, columns)
    except Declined:
        return False
    return True


def _products(
    x: Tensor,
    rows: Tensor | None,
    ends: Tensor,
    stacks: Sequence[Stack],
    between: Callable[[Tensor], Tensor],
    scheme: Scheme | None,
    columns: bool,
) -> Tensor:
    """Compute `chain`: on a GPU with one kernel for all groups, whose sizes stay on the device, if there is one.

    Otherwise group by group, so that intermediate results stay in the cache.
    """
    if gpu.takes(x) and (found := _on_gpu(x, rows, ends, stacks, between, scheme, columns)) is not None:
        return found
    count = x.shape[0] if rows is None else rows.shape[0]
    given = _codes(x, stacks[0], scheme)
    if rows is not None:
        given = _gathered(given, rows) if isinstance(given, QuantizedTensor) else given[rows]
    results, bounds = [], [0, *ends.tolist()]  # the only synchronization with a GPU
    groups = [(i, *bound) for i, bound in enumerate(itertools.pairwise(bounds)) if bound[0] < bound[1]]
    if not groups and _is_recorded(x, stacks):
        groups = [(0, 0, 0)]  # a result of zeros that is part of the autograd graph
    for i, start, end in groups:
        y = _range(given, start, end)
        for j, (weight, bias) in enumerate(stacks):
            row_bias = None if bias is None else bias[i]
            y = _product(between(y) if j else y, _matrix(weight, i), row_bias, scheme, columns)
        results.append(y)
    if bounds[-1] < count or not results:
        results.append(x.new_zeros(count - bounds[-1], stacks[-1].weight.shape[2 if columns else 1]))
    return results[0] if len(results) == 1 else torch.cat(results)


def _on_gpu(
    x: Tensor,
    rows: Tensor | None,
    ends: Tensor,
    stacks: Sequence[Stack],
    between: Callable[[Tensor], Tensor],
    scheme: Scheme | None,
    columns: bool,
) -> Tensor | None:
    """Compute `chain` with grouped kernels; None if one is missing for a product, or autograd records the call."""
    if scheme is None or (q := scheme.lhs) is None or _is_recorded(x, stacks):
        return None
    by_rows = kernels.is_by_rows(q)
    if not by_rows and not kernels.is_by_group(q):
        return None
    groups = None if by_rows else Groups.of(ends, len(x) if rows is None else len(rows))
    if by_rows:
        given = quantize(q, x)
        given = given if rows is None else _gathered(given, rows)
    else:
        given, _ = kernels.of_rows(q, x if rows is None else x[rows], groups)
    result = x.dtype if x.dtype in kernels.REALS else torch.float32
    y = x
    for i, (weight, bias) in enumerate(stacks):
        given = kernels.of_rows(q, between(y), groups)[0] if i else given
        product = kernels.product(given, kernels.of_weight(x, weight, scheme, columns), ends, bias, result, columns)
        if isinstance(product, Declined):
            return None
        y = product().to(x.dtype)
    return y


def _is_recorded(x: Tensor, stacks: Sequence[Stack]) -> bool:
    """Whether autograd records the call."""
    return torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, *itertools.chain.from_iterable(stacks))
    )


def _product(x: object, matrix: object, bias: Tensor | None, scheme: Scheme | None, columns: bool) -> Tensor:
    if not columns:
        args = (aten.linear.default, (x, matrix, bias))
    else:
        args = (aten.mm.default, (x, matrix)) if bias is None else (aten.addmm.default, (bias, x, matrix))
    op, operands = args
    return op(*operands) if scheme is None else quantized(op, scheme, *operands)


def _codes(x: Tensor, stack: Stack, scheme: Scheme | None) -> Tensor:
    """The quantized rows if each row is quantized independently and autograd does not record; else x."""
    q = None if scheme is None else scheme.lhs
    if q is None or not kernels.is_by_rows(q) or _is_recorded(x, [stack]):
        return x
    return quantize(q, x)


def _gathered(x: QuantizedTensor, rows: Tensor) -> QuantizedTensor:
    buffers = {name: buffer.index_select(0, rows) for name, buffer in x.buffers().items()}
    return x.rebuilt(buffers, shape=(rows.shape[0], x.shape[1]))


def _range(x: Tensor, start: int, end: int) -> Tensor:
    if not isinstance(x, QuantizedTensor):
        return x[start:end]
    return x.rebuilt({name: buffer[start:end] for name, buffer in x.buffers().items()}, shape=(end - start, x.shape[1]))


def _matrix(weight: Tensor, i: int) -> Tensor:
    """Matrix i as a view of the stack."""
    if not isinstance(weight, QuantizedTensor):
        return weight[i]
    buffers = {name: buffer[i] for name, buffer in weight.buffers().items()}
    return weight.rebuilt(buffers, quantizer=_of_matrix(weight.quantizer), shape=weight.shape[1:])


@functools.lru_cache(maxsize=1024)
def _of_matrix(q: Quantizer) -> Quantizer:
    """The quantizer of one matrix of a stack."""
    plain = q.plain.of_blocks(lambda block: block[1:])
    of_matrix = None if q.layout is None else q.layout.of_matrix
    return plain if of_matrix is None else replace(plain, layout=of_matrix)


def explain(
    x: Tensor,
    rows: Tensor | None,
    ends: Tensor,
    weight: Sequence[Tensor],
    bias: Tensor | None,
    scheme: str,
    quantizer: str,
    shape: Sequence[int],
    columns: bool,
) -> str:
    """Explain which kernel computes a call of hop::stacked and its gradients, one line each."""
    stack = Stack(_assembled(weight, quantizer, shape, x.dtype), bias)
    found = kernels.asked(
        x if rows is None else x[rows], ends, stack, Scheme.parse(scheme) if scheme else None, columns
    )
    return "\n".join(
        f"{name}: GPU groups: {f'{p.reason}; group by group: chosen' if isinstance(p, Declined) else 'chosen'}"
        for name, p in found.items()
    )


# ---- as one operator of traced programs


@torch.library.custom_op("hop::stacked", mutates_args=())
def _stacked(
    x: Tensor,
    rows: Tensor | None,
    ends: Tensor,
    weight: Sequence[Tensor],
    bias: Tensor | None,
    scheme: str,
    quantizer: str,
    shape: Sequence[int],
    columns: bool,
) -> Tensor:
    stack = Stack(_assembled(weight, quantizer, shape, x.dtype), bias)
    return _single(x, rows, ends, stack, scheme, columns)


EXPLAINED[torch.ops.hop.stacked.default] = explain


@_stacked.register_fake
def _(x: Tensor, rows: Tensor | None, *others: Any) -> Tensor:
    *_, shape, columns = others
    return x.new_empty(x.shape[0] if rows is None else rows.shape[0], shape[2 if columns else 1])


def _single(x: Tensor, rows: Tensor | None, ends: Tensor, stack: Stack, scheme: str, columns: bool) -> Tensor:
    return _products(x, rows, ends, [stack], _nothing, Scheme.parse(scheme) if scheme else None, columns)


def _nothing(x: Tensor) -> Tensor:
    return x


def _assembled(parts: Sequence[Tensor], quantizer: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A weight from its buffers."""
    if not quantizer:
        return parts[0]
    q = Quantizer.parse(quantizer)
    return QuantizedTensor.fitting(dict(zip(q.buffers(shape), parts, strict=True)), q, tuple(shape), dtype)


@torch.library.custom_op("hop::stacked_gradient", mutates_args=())
def _stacked_gradient(
    grad: Tensor,
    x: Tensor,
    rows: Tensor | None,
    ends: Tensor,
    weight: Sequence[Tensor],
    bias: Tensor | None,
    scheme: str,
    quantizer: str,
    shape: Sequence[int],
    columns: bool,
) -> list[Tensor]:
    """Gradients of x, of a float weight and of the bias; empty tensors for those that do not exist.

    Computed by grouped kernels on a GPU if there are any, else by differentiating a recomputed forward.
    """
    text, none = scheme, x.new_empty(0)
    if text and gpu.takes(x):
        stack = Stack(_assembled(weight, quantizer, shape, x.dtype), bias)
        found = kernels.gradients(grad, x, rows, ends, stack, Scheme.parse(text), columns)
        if not isinstance(found, Declined):
            return [none.clone() if g is None else g for g in found]
    with eager.recording(), torch.enable_grad():
        given = [x, *weight] if not quantizer else [x]
        given = [t.detach().requires_grad_() for t in (*given, *(() if bias is None else (bias,)))]
        weights = _assembled(weight if quantizer else given[1:2], quantizer, shape, x.dtype)
        out = _single(given[0], rows, ends, Stack(weights, None if bias is None else given[-1]), scheme, columns)
        gradients = torch.autograd.grad(out, given, grad, allow_unused=True, materialize_grads=True)
    return [gradients[0], none if quantizer else gradients[1], none.clone() if bias is None else gradients[-1]]


@_stacked_gradient.register_fake
def _(grad: Tensor, x: Tensor, *others: Any) -> list[Tensor]:
    _, _, weight, bias, _, quantizer, *_ = others
    none = x.new_empty(0)
    own = none if quantizer else torch.empty_like(weight[0])
    return [torch.empty_like(x), own, none.clone() if bias is None else torch.empty_like(bias)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, rows, ends, weight, bias, *ctx.others = inputs
    ctx.count = len(weight)
    ctx.save_for_backward(x, rows, ends, bias, *weight)


def _backward(ctx: Any, grad: Tensor) -> Any:
    x, rows, ends, bias, *weight = ctx.saved_tensors
    _, quantizer, *_ = ctx.others
    if torch.is_grad_enabled() and eager.is_plain_eager():  # create_graph=True: use operators that have derivatives
        of_x, of_weight, of_bias = _differentiable(grad, x, rows, ends, weight, bias, *ctx.others)
    else:
        of_x, of_weight, of_bias = torch.ops.hop.stacked_gradient(grad, x, rows, ends, weight, bias, *ctx.others)
    return (
        of_x,
        None,
        None,
        [None] * ctx.count if quantizer else [of_weight],
        None if bias is None else of_bias,
        *(None,) * 4,
    )


def _differentiable(
    grad: Tensor,
    x: Tensor,
    rows: Tensor | None,
    ends: Tensor,
    weight: Sequence[Tensor],
    bias: Tensor | None,
    scheme: str,
    quantizer: str,
    shape: Sequence[int],
    columns: bool,
) -> list[Tensor | None]:
    """The gradients of inputs that require one, recorded by autograd so that they can be differentiated again."""
    inputs = [x, None if quantizer else weight[0], bias]
    stack = Stack(_assembled(weight, quantizer, shape, x.dtype), bias)
    out = _single(x, rows, ends, stack, scheme, columns)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True, allow_unused=True))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


_stacked.register_autograd(_backward, setup_context=_keep)
