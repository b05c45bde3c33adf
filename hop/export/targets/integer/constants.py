"""Constant values of a program, and constants added to it."""

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Graph, Node

from hop.compat import eager

INT4 = "_int4"  # suffix of the names of constants that ONNX stores in 4 bits


class Constants:
    """The values in a graph that depend only on parameters, buffers and constants; and new constants."""

    def __init__(self, program: ExportedProgram, graph: Graph) -> None:
        tensors, signature = {**program.constants, **program.state_dict}, program.graph_signature
        changed = set(signature.buffers_to_mutate.values())
        kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        given = {
            spec.arg.name: tensors[spec.target].detach()
            for spec in signature.input_specs
            if spec.kind in kinds and spec.target in tensors and spec.target not in changed
        }
        self.values = {node: given[node.name] for node in graph.find_nodes(op="placeholder") if node.name in given}
        self.constant = set(self.values)
        for node in graph.nodes:
            is_operator = node.op == "call_function" and isinstance(node.target, eager.OpOverload)
            if is_operator and all(x in self.constant for x in node.all_input_nodes):
                self.constant.add(node)
        self.graph = graph
        self.specs = list(signature.input_specs)
        self.place = sum(spec.kind != InputKind.USER_INPUT for spec in self.specs)
        self.added: dict[str, Tensor] = {}
        self.mode = next(n.meta["val"].fake_mode for n in graph.nodes if isinstance(n.meta.get("val"), Tensor))

    def find(self, node: Node) -> Tensor | None:
        """The value of a node; None if it depends on an input."""
        if node not in self.constant:
            return None
        if node not in self.values:
            values = {x: self.find(x) for x in node.all_input_nodes}
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda x: values[x])
            self.values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self.values[node]

    def add(self, name: str, x: Tensor) -> Node:
        """Add a constant to the program."""
        x = x.detach().contiguous()
        name = f"{name}_{len(self.added)}"
        if x.dtype == torch.int8 and x.numel() and int(x.min()) >= -8 and int(x.max()) <= 7:
            name += INT4
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
        self.added[node.name] = x
        self.values[node] = x
        self.constant.add(node)
        return node
