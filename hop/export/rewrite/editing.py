"""Editing: an exported program while its nodes are being replaced."""

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from hop.compat.pytree import tree_map_only
from hop.compat.subclasses import FakeTensor
from hop.dispatch.operators import aten
from hop.export.rewrite.folding import ProgramConstants, known_tensors
from hop.export.rewrite.program import copy_graph, value
from hop.impls.scaled import scaled_buffers
from hop.tensor.buffers.operators import quantize_buffers


class Editing:
    """A program, its graph, and its constant tensors by node.

    Args:
        program: the program; its graph is copied.
        prefix: of the names of added constants.
    """

    def __init__(self, program: ExportedProgram, prefix: str) -> None:
        self.prefix = prefix
        self.program, self.graph = program, copy_graph(program)
        self.known = known_tensors(program, self.graph)
        self.constants = ProgramConstants(program)
        self.casts: dict[Node, Node] = {}
        vals = (node.meta.get("val") for node in self.graph.nodes)
        self.mode: Any = next((v.fake_mode for v in vals if isinstance(v, FakeTensor)), None)

    def float32(self, before: Node, x: Node) -> Node:
        """x in float32, which quantization requires; the cast is created once per node."""
        if value(x).dtype == torch.float32:
            return x
        if before not in self.casts:
            self.casts[before] = self.call(before, aten._to_copy.default, x, dtype=torch.float32)
        return self.casts[before]

    def constant_node(self, name: str, x: Tensor) -> Node:
        """Add a constant to the program."""
        name, i = f"{self.prefix}_{name}", 0
        while (unique := f"{name}_{i}" if i else name) in {*self.constants.tensors, *self.program.state_dict}:
            i += 1
        x = x.detach().clone()
        val = x if self.mode is None else self.mode.from_tensor(x, static_shapes=True)
        node = self.constants.hold(self.graph, unique, x, val)
        self.known[node] = x
        return node

    def call(self, before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        node.meta |= {k: v for k, v in before.meta.items() if k in ("nn_module_stack", "stack_trace")}
        given, named = tree_map_only(Node, value, (args, kwargs))
        with torch.no_grad(), self.mode or contextlib.nullcontext():
            node.meta["val"] = target(*given, **named)
        return node

    def replace(self, node: Node, outputs: Sequence[Any]) -> None:
        """Redirect the readers of a node's buffers to new codes, and to the scale and zero point that the node was
        given.
        """
        for user in list(node.users):
            i: Any = user.args[1]
            replacement, buffer = outputs[i], value(user)
            if i:
                # Scales of rows keep the caller's shape, including symbolic sizes.
                if value(replacement).shape != buffer.shape:
                    sizes = [n if isinstance(n, int) else -1 for n in buffer.shape]
                    replacement = self.call(node, aten.reshape.default, replacement, sizes)
                replacement = self.call(node, aten._to_copy.default, replacement, dtype=buffer.dtype)
                if (source := self.known.get(self.source(outputs[i]))) is not None and source.numel() == 1:
                    self.known[replacement] = source
            user.replace_all_uses_with(replacement)
            self.graph.erase_node(user)
        self.graph.erase_node(node)

    def source(self, node: Node) -> Node:
        """The scale or zero point that a caller passed to our operator and that its output returns."""
        while node not in self.known and node.target is operator.getitem:
            call, i = node.args
            given = {quantize_buffers: (2, 3), scaled_buffers: (2, 3)}.get(call.target)  # type: ignore[union-attr]
            if not given or i not in (1, 2) or not isinstance(call.args[given[i - 1]], Node):  # type: ignore[union-attr, operator]
                return node
            node = call.args[given[i - 1]]  # type: ignore[union-attr, operator, assignment]
        return node
