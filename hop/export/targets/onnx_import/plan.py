"""The nodes of a file to run, in order: without those that depend on constants only, and with the branches taken."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from hop.compat.pytree import Args
from hop.compat.subclasses import FakeTensorMode
from hop.export.targets.onnx_import import nibbles
from hop.export.targets.onnx_import.calls import Numbers
from hop.export.targets.onnx_import.reading import Constant, FileGraph, FileNode
from hop.numerics.spelling import shown

_MOST_FOLDED = 2**16  # elements of the operands or results of a node that is computed at once
_WITH_SCALES = ("DequantizeLinear", "QLinear", "QGemm", "DynamicQuantize", "ToFloat")  # codes of weights stay codes
_ANY_SIZE = ("QuantizeLinear", "com.microsoft.QuantizeLinear")  # of weights that the file has as floats
_VALUES = ("value", "value_float", "value_floats", "value_int", "value_ints")


class Plan:
    """The nodes that must run, of the graphs given to `add`.

    Args:
        fold: computes the results of a node from constants.
        place: describes a node in error messages.
        known: the operators that are supported.

    Attributes:
        nodes: in order.
        constants: of the file, of its Constant nodes and results of folded nodes, by name.
        names: for a name in the file whose value has another name, that name.
    """

    def __init__(
        self,
        fold: Callable[[FileNode], Args],
        place: Callable[[FileNode], str],
        known: Collection[str],
    ) -> None:
        self.fold, self.place, self.known = fold, place, known
        self.nodes: list[FileNode] = []
        self.constants: dict[str, Constant] = {}
        self.names: dict[str, str] = {}

    def add(self, graph: FileGraph, scope: Mapping[str, str] = {}, prefix: str = "") -> dict[str, str]:
        """Add a graph, whose names get `prefix`; `scope` has the names around it. Returns the names of its values."""
        own = {**scope, **{name: f"{prefix}{name}" for name in graph.constants}} if prefix else {}
        self.constants.update((f"{prefix}{name}", c) for name, c in graph.constants.items())
        for node in graph.nodes:
            if prefix:
                own |= {name: f"{prefix}{name}" for name in node.outputs}
            inputs = tuple(self.name(name, own) for name in node.inputs)
            outputs = tuple(own.get(name, name) for name in node.outputs)
            self.add_node(replace(node, inputs=inputs, outputs=outputs), own)
        return own

    def name(self, name: str, own: Mapping[str, str]) -> str:
        name = own.get(name, name)
        return self.names.get(name, name)

    def add_node(self, node: FileNode, own: Mapping[str, str]) -> None:
        if node.op == "Constant":
            self.constants[node.outputs[0]] = self.stored(node)
        elif node.op == "If":
            self.add_branch(node, own)
        elif node.op not in self.known:
            raise NotImplementedError(
                f"{self.place(node)} is not supported: its operator is unknown here; rewrite the model without it, "
                f"supported are {', '.join(sorted(self.known))}"
            )
        elif node.op == nibbles.OP:
            self.nodes.append(self.unpacked(node))
        elif not self.folded(node):
            self.nodes.append(node)

    def unpacked(self, node: FileNode) -> FileNode:
        """A product with a packed weight, with constants that have a byte per code."""
        try:
            return nibbles.unpacked(node, self.constants)
        except NotImplementedError as error:
            raise NotImplementedError(f"{self.place(node)} is not supported: {error}") from error
        except ValueError as error:
            raise ValueError(f"{self.place(node)} is invalid: {error}") from error

    def stored(self, node: FileNode) -> Constant:
        """The value of a Constant node."""
        if len(node.attributes) != 1 or (name := next(iter(node.attributes))) not in _VALUES:
            raise NotImplementedError(
                f"{self.place(node)} is not supported: it must have one of the attributes {', '.join(_VALUES)}, and "
                f"has {shown(tuple(node.attributes))}"
            )
        value = node.attributes[name]
        if name == "value":
            if not isinstance(value, Constant):
                raise ValueError(f"{self.place(node)} is invalid: its value is not a tensor")
            return value
        return Constant.of(torch.tensor(value, dtype=torch.float32 if "float" in name else torch.int64))

    def add_branch(self, node: FileNode, own: Mapping[str, str]) -> None:
        """Add the branch that a constant condition takes."""
        condition = self.constants.get(node.inputs[0]) if node.inputs else None
        if condition is None or condition.elements is None or len(condition.elements) != 1:
            raise NotImplementedError(
                f"{self.place(node)} is not supported: its condition depends on inputs; export the model without "
                "control flow"
            )
        branch = node.attributes.get("then_branch" if condition.elements[0] else "else_branch")
        if not isinstance(branch, FileGraph) or len(branch.outputs) != len(node.outputs):
            raise ValueError(
                f"{self.place(node)} is invalid: its branch is not a graph with {len(node.outputs)} results"
            )
        inner = self.add(branch, own, f"{node.outputs[0]}/")
        for outer, name in zip(node.outputs, branch.outputs, strict=True):
            self.names[outer] = self.name(name, inner)

    def folded(self, node: FileNode) -> bool:
        """Compute a node whose inputs are constants, if these and its results are small; whether it is done."""
        if (
            any(name in node.op for name in _WITH_SCALES)
            or not node.inputs
            or not all(n in self.constants for n in node.inputs if n)
        ):
            return False
        if node.op not in _ANY_SIZE:
            if sum(self.constants[n].data.numel() for n in node.inputs if n) > _MOST_FOLDED:
                return False
            with FakeTensorMode(allow_non_fake_inputs=True):
                sizes = [x.numel() for x in self.fold(node) if isinstance(x, Tensor)]
            if sum(sizes) > _MOST_FOLDED:
                return False
        for name, x in zip(node.outputs, self.fold(node), strict=False):
            self.constants[name] = Constant.of(x.tensor() if isinstance(x, Numbers) else x.detach().clone())
        return True
