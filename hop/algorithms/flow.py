"""Flow: find what precedes the linear layers of a model, in its exported graph, and can absorb a factor per channel.

If y is computed channel by channel from Parameters, these may be divided by a factor s per channel, provided that
everything that reads y is a linear layer that multiplies by s. The Parameters are those of a

    layer norm, RMS norm, product with a Parameter      weight and bias / s
    linear layer                                        rows of the weight, and bias / s

Between the two there may be operators f that keep channels apart, f(y / s) = f(y) / s: views and copies, relu and the
like, products with other tensors, as in a gated MLP, and an attention of which y are the values. Candidates are found
by walking up from a layer; walking down from a candidate through all its readers proves it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from hop.compat.pytree import Args

aten = torch.ops.aten

_KEEPS = {
    aten.dropout.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.detach.default,
    aten.to.dtype,
    aten._to_copy.default,
    aten.relu.default,
    aten.relu_.default,
    aten.leaky_relu.default,
    aten.leaky_relu_.default,
}
_RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints}
_RESHAPES |= {aten.unsqueeze.default, aten.squeeze.dim}
_MOVES = {aten.transpose.int, aten.permute.default, aten.slice.Tensor, aten.select.int}
_MULTIPLIES = {aten.mul.Tensor, aten.mul_.Tensor}
_BY_CHANNEL = _MULTIPLIES | {aten.relu.default, aten.relu_.default, aten.leaky_relu.default, aten.leaky_relu_.default}
_MATMULS = {aten.matmul.default, aten.bmm.default}
_ATTENTION = aten.scaled_dot_product_attention.default
_LINEAR, _LAYER_NORM, _RMS_NORM = aten.linear.default, aten.layer_norm.default, aten.rms_norm.default

Dims = tuple[int, ...]
"""The channel dimensions of a tensor: one, or the heads and the channels of each."""


@dataclass(frozen=True)
class FoldTarget:
    """A module that can absorb a factor per channel.

    Attributes:
        name: the module's name.
        parameters: the names of its weight and, if any, its bias, with channels along the first dimension.
        readers: the names of the linear layers that read its output; all of them must take the factor.
        head: channels per head of an attention between the two; None if there is none.
        mixes: whether channels may be mixed, within a head: the module is a linear layer, and only views, copies and an
            attention follow it.
    """

    name: str
    parameters: tuple[str, ...]
    readers: frozenset[str]
    head: int | None = None
    mixes: bool = False


class NotFoldable(Exception):
    """The reason why nothing before a layer can absorb a factor."""


class Flow:
    """The exported graph of a float model.

    Args:
        model: the float model.
        args, kwargs: an example input.

    Raises:
        NotFoldable: the model cannot be exported.
    """

    def __init__(self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        try:
            with torch.no_grad():
                program = torch.export.export(model, args, kwargs, strict=False)
        except Exception as error:  # a model's forward may raise anything while it is traced
            first = str(error).strip().partition("\n")[0]
            raise NotFoldable(f"torch.export cannot trace the model ({type(error).__name__}: {first})") from error
        self._names = program.graph_signature.inputs_to_parameters
        self._calls: dict[str, list[Node]] = {}
        for node in program.graph_module.graph.nodes:
            if (layer := self._layer(node)) is not None:
                self._calls.setdefault(layer, []).append(node)

    def source(self, name: str) -> FoldTarget:
        """The module that can absorb a factor of the linear layer `name`.

        Raises:
            NotFoldable: there is none; the message gives the reason.
        """
        calls = self._calls.get(name, [])
        if len(calls) != 1:
            raise NotFoldable(f"the exported graph calls it {len(calls)} times")
        reasons: list[str] = []
        for node in self._before(calls[0].args[0], reasons):
            try:
                parameters = self._parameters(node)
                readers: dict[str, set[Node]] = {}
                self._follow(node, (len(_shape(node)) - 1,), {node}, readers)
                if name in readers:
                    owner, between = parameters[0].rpartition(".")[0], set[Node]().union(*readers.values())
                    mixes = node.target is _LINEAR and not any(n.target in _BY_CHANNEL for n in between)
                    return FoldTarget(owner, parameters, frozenset(readers), self._head(between), mixes)
            except NotFoldable as reason:
                reasons.append(str(reason))
        raise NotFoldable(reasons[0] if reasons else "nothing before it has a Parameter for each channel")

    # ---- upward

    def _before(self, node: object, reasons: list[str]) -> Iterator[Node]:
        """The nodes before `node` that may be divided, nearest first."""
        if not isinstance(node, Node) or node.op == "placeholder":
            reasons.append("it reads an input of the model")
            return
        target = node.target
        if target in (_LINEAR, _LAYER_NORM, _RMS_NORM):
            yield node
        elif target in _KEEPS or target in _RESHAPES or target in _MOVES:
            yield from self._before(node.args[0], reasons)
        elif target in _MULTIPLIES:
            if self._factor(node) is not None:
                yield node
            elif any(len(_shape(side)) == 1 for side in node.args[:2]):
                reasons.append("it reads a product of channels with something other than a Parameter")
            for side in reversed(node.args[:2]):
                if isinstance(side, Node) and side.op != "placeholder" and _shape(side) == _shape(node):
                    yield from self._before(side, reasons)
        elif target is _ATTENTION or target in _MATMULS:
            yield from self._before(node.args[2 if target is _ATTENTION else 1], reasons)
        else:
            reasons.append(f"it reads the result of {_node_name(node)}, which takes no factor")

    def _parameters(self, node: Node) -> tuple[str, ...]:
        """The names of the Parameters to divide. Raises NotFoldable if the node has none that it alone reads."""
        target: Any = node.target
        arguments: Args = node.args
        if target is _LINEAR:
            given = arguments[1:3]
        elif target in _MULTIPLIES:
            given = (self._factor(node),)
        else:
            given = arguments[2:4] if target is _LAYER_NORM else arguments[2:3]
            if not given or given[0] is None or len(arguments[1]) != 1:
                raise NotFoldable(f"the {_node_name(node)} before it has no weight for each channel")
        parameters: list[str] = []
        for each in given:
            if each is not None:
                name = self._names.get(each.name)
                if name is None or len(each.users) != 1:
                    raise NotFoldable(
                        f"the weight of the {_node_name(node)} before it is not a Parameter that it alone reads"
                    )
                parameters.append(name)
        return tuple(parameters)

    def _factor(self, node: Node) -> Node | None:
        """The one-dimensional Parameter that a product multiplies channels by, if any."""
        for side in node.args[:2]:
            if isinstance(side, Node) and side.name in self._names and _shape(side) == _shape(node)[-1:]:
                return side
        return None

    # ---- downward

    def _follow(self, node: Node, dims: Dims, cone: set[Node], readers: dict[str, set[Node]]) -> None:
        """Add the linear layers that read `node` to `readers`, each with the nodes in between.

        `dims` are the channel dimensions of `node`, `cone` the nodes up to here. Raises NotFoldable if anything else
        reads `node`.
        """
        if not node.users:
            raise NotFoldable("its input is an output of the model")
        for user in node.users:
            target = user.target
            if target is _LINEAR and user.args[0] is node and node not in user.args[1:]:
                layer = self._layer(user)
                if layer is None or dims != (len(_shape(node)) - 1,):
                    raise NotFoldable("a linear layer reads its input along other channels")
                readers[layer] = cone
                continue
            after = self._dims_after(user, node, dims)
            if after is None or user.op != "call_function":
                raise NotFoldable(f"its input is also read by {_node_name(user)}")
            if user in cone:
                raise NotFoldable(f"{_node_name(user)} multiplies it by itself")
            self._follow(user, after, cone | {user}, readers)

    def _head(self, cone: set[Node]) -> int | None:
        """The channels per head, if there is an attention in the cone."""
        for node in cone:
            if node.target is _ATTENTION or node.target in _MATMULS:
                return _shape(node)[-1]
        return None

    def _dims_after(self, user: Node, node: Node, dims: Dims) -> Dims | None:
        """The channel dimensions of the output of `user`, given those of `node`; None if it mixes channels."""
        target = user.target
        before, after = _shape(node), _shape(user)
        if [a for a in user.args if a is node] != [node] or node in user.kwargs.values():
            return None  # it reads the node twice
        if target in _KEEPS:
            return dims
        if target in _MULTIPLIES:
            return dims if before == after else None
        if target in _RESHAPES:
            return _dims_after_reshape(before, after, dims)
        if target in _MOVES:
            return _dims_after_move(user, len(before), dims)
        if target is _ATTENTION and user.args[2] is node:
            return dims if before[:-2] == after[:-2] and len(before) - 2 not in dims else None
        if target in _MATMULS and user.args[1] is node:
            return dims if before[:-2] == after[:-2] and len(before) - 2 not in dims else None
        return None

    def _layer(self, node: Node) -> str | None:
        """The name of the linear layer that a node calls, if it is one."""
        if node.target is not _LINEAR or not isinstance(node.args[1], Node):
            return None
        name = self._names.get(node.args[1].name)
        return None if name is None or not name.endswith("weight") else name.rpartition(".")[0]


def _dims_after_reshape(before: tuple[int, ...], after: tuple[int, ...], dims: Dims) -> Dims | None:
    """The dimensions that `dims` become in a reshape: they must start at the same offset and have the same size."""
    if dims != tuple(range(dims[0], dims[-1] + 1)):
        each = [_dims_after_reshape(before, after, (d,)) for d in dims]
        return None if any(e is None or len(e) != 1 for e in each) else tuple(e[0] for e in each if e)
    lead, size = _product(before[: dims[0]]), _product(before[dims[0] : dims[-1] + 1])
    for start in range(len(after) + 1):
        for end in range(start + 1, len(after) + 1):
            if _product(after[:start]) == lead and _product(after[start:end]) == size:
                return tuple(d for d in range(start, end) if after[d] != 1) or (start,)
    return None


def _dims_after_move(user: Node, count: int, dims: Dims) -> Dims | None:
    """The dimensions that `dims` become in a transpose, permutation, slice or select."""
    target: Any = user.target
    given: Any = user.args[1:]
    if target is aten.transpose.int:
        a, b = (d % count for d in given[:2])
        return tuple(b if d == a else a if d == b else d for d in dims)
    if target is aten.permute.default:
        return tuple([d % count for d in given[0]].index(d) for d in dims)
    at = (given[0] if given else 0) % count
    if at in dims:
        return None
    return dims if target is aten.slice.Tensor else tuple(d - (d > at) for d in dims)


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= int(size)
    return result


def _shape(node: object) -> tuple[int, ...]:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _node_name(node: Node) -> str:
    return "the output of the model" if node.op == "output" else str(node.target).rpartition(".")[0] or str(node.target)
