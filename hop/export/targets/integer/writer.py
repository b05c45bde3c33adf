"""Convert a program node by node; a file format is a subclass of Writer."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from hop.compat.pytree import tree_leaves
from hop.dispatch import compiled
from hop.dispatch.operand import Operand, decode
from hop.dispatch.operators import VIEW, Family, aten, of
from hop.export.rewrite.program import value
from hop.export.targets.integer.constants import Constants
from hop.export.targets.integer.model import Model
from hop.export.targets.integer.steps import Index, Step, Weight
from hop.export.targets.integer.values import Codes, new, tensor
from hop.numerics.formats import INT8, INT16, Integer
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import Convention


class Writer:
    """Converts a program node by node into a file under construction.

    Subclasses set the names of the function and the runtime, for errors; the class of the result; the formats of codes;
    and the converters of operator families and of constant padding.
    """

    caller: ClassVar[str]
    runtime: ClassVar[str]
    model: ClassVar[type[Model]]
    formats: ClassVar[tuple[Integer, ...]] = (INT8, INT16)
    converters: ClassVar[Mapping[Family, Callable[[Step], None]]]
    padded: ClassVar["staticmethod[[Step], None]"]

    def __init__(self, program: ExportedProgram, file: Any) -> None:
        self.program, self.file = program, file
        self.constants = Constants(program, program.graph)
        self.held: dict[Node, Codes] = {}
        self.inputs: dict[str, int] = {}

    def spelled(self, word: str) -> str:
        """The names of the supported formats of codes."""
        return word.join(f.name for f in self.formats)

    def written(self) -> Any:
        """Convert the program and return the model."""
        for node in self.program.graph.nodes:
            if node.op == "call_function" and node not in self.constants.constant:
                try:
                    self.visit(node)
                except (NotImplementedError, TypeError) as error:
                    raise NotImplementedError(
                        f"{self.caller}: node {node.name!r} ({self.named(node)}) cannot be converted: {error}"
                    ) from error
        outputs = {}
        for i, node in enumerate(tree_leaves(self.program.graph.output_node().args[0])):
            if node not in self.held:
                raise NotImplementedError(
                    f"{self.caller}: output {i}, {node}, has no {self.spelled(' or ')} codes; quantize it"
                )
            outputs[f"output_{i}"] = tensor(self.file, self.held[node])
        shown = {
            node.name: (self.file.name(index), order)
            for node, codes in self.held.items()
            for order, index in list(codes.tensors.items())[:1]
        }
        places = [n.name for n in self.program.graph.find_nodes(op="placeholder") if n.name in self.inputs]
        return self.model(self.file.finish({n: self.inputs[n] for n in places}, outputs), shown)

    def named(self, node: Node) -> str:
        return str(node.args[0] if node.target is compiled.operators["hop_scaled_buffers"] else node.target)

    def visit(self, node: Node) -> None:
        if node.target is compiled.operators["hop_quantize_buffers"]:
            self.quantized(node)
        elif node.target is compiled.operators["hop_scaled_buffers"]:
            self.scaled(node)
        elif (source := self.source(node)) is not None:
            self.held[node] = self.held[source]
        elif of(node.target).family is VIEW and node.args[0] in self.held:
            x = self.held[node.args[0]]  # type: ignore[index]
            result = replace(x, name=node.name, shape=_shape(value(node)), tensors={})
            self.write(VIEW, Step(self.file, node.target, (x, *node.args[1:]), dict(node.kwargs), result))
            self.held[node] = result
        elif node.target is aten.constant_pad_nd.default and node.args[0] in self.held:
            x = self.held[node.args[0]]  # type: ignore[index]
            self.held[node] = replace(x, name=node.name, shape=_shape(value(node)), tensors={})
            self.padded(Step(self.file, node.target, (x, *node.args[1:]), dict(node.kwargs), self.held[node]))
        elif isinstance(value(node), Tensor) and node.users:
            raise NotImplementedError(
                "it is not an operator on codes; to_integer leaves none for an integer-only target"
            )

    def source(self, node: Node) -> Node | None:
        """The node whose codes this one passes on."""
        first = None
        if node.target is compiled.operators["hop_dequantize_buffers"]:
            first = node.args[1][0]  # type: ignore[index]
        elif node.target is aten.detach.default or (node.target is operator.getitem and node.args[1] == 0):
            first = node.args[0]
        return first if first in self.held else None

    def quantized(self, node: Node) -> None:
        """Make an input, which the file takes as codes."""
        spelled, x, scale, zero = node.args[:4]
        if not isinstance(x, Node) or x.op != "placeholder" or x in self.constants.constant:
            raise NotImplementedError("it quantizes floats other than an input of the program")
        codes = Codes(x.name, _shape(value(x)), *self.units(Quantizer.parse(str(spelled)), scale, zero))
        index = new(self.file, codes, codes.plain)
        if x.name in self.inputs:
            before = next(c for n, c in self.held.items() if c.name == x.name)
            if not before.is_alike(codes):
                raise NotImplementedError(f"the input {x.name!r} is quantized with two scales")
            codes, index = before, self.inputs[x.name]
        self.inputs[x.name] = index
        codes.tensors[codes.plain] = index
        self.held[node] = codes

    def scaled(self, node: Node) -> None:
        op, spelled, scale, zero, *flat = node.args
        output = Quantizer.parse(str(spelled)) if str(spelled).startswith("hop1:") else None
        if output is None:
            raise NotImplementedError(f"its result is {spelled}; quantize it")
        shape = _shape(value(node)[0])
        result = Codes(node.name, shape, *self.units(output, scale, zero))
        args = tuple(self.argument(x) for x in decode(op, flat))  # type: ignore[arg-type]
        convention: Convention | None = output.scale.requantization
        low, high = (None, None) if convention is None else (convention.low, convention.high)
        family = of(op).family
        self.write(family, Step(self.file, op, args, dict(node.kwargs), result, low, high, convention))
        self.held[node] = result

    def write(self, family: Family, step: Step) -> None:
        if family not in self.converters:
            raise NotImplementedError(f"conversion of {family.name} to {self.runtime} is not supported")
        self.converters[family](step)

    def argument(self, x: object) -> Any:
        """An argument of a call as the converters expect it."""
        if isinstance(x, Operand):
            return self.operand(x)
        if isinstance(x, list) and any(isinstance(v, Operand) for v in x):
            return [self.argument(v) for v in x]
        if isinstance(x, Node) and x not in self.constants.constant and value(x).dtype in (torch.int32, torch.int64):
            return self.index(x)
        if isinstance(x, Node):
            if (constant := self.constants.find(x)) is None:
                raise NotImplementedError(f"its argument {x.name!r} is a float tensor; quantize it")
            return constant
        return x

    def index(self, x: Node) -> Index:
        """Integer indices, which must be an input of the program."""
        if x.op != "placeholder":
            raise NotImplementedError(
                f"its argument {x.name!r} has integers that the program computes; make it an input"
            )
        if x.name not in self.inputs:
            self.inputs[x.name] = self.file.tensor(x.name, _shape(value(x)), value(x).dtype)
        return Index(self.inputs[x.name])

    def operand(self, x: Operand) -> Codes | Weight:
        nodes: Any = x.tensors  # of a graph
        codes, *stored = nodes
        values = [self.constants.find(t) for t in stored]
        if any(t is None for t in values):
            raise NotImplementedError(f"its scales are dynamic; {self.runtime} needs static ones")
        scale, zero = values[0], values[1] if len(values) > 1 else torch.full((1,), x.quantizer.format.zero)
        assert scale is not None and zero is not None
        if codes in self.held:
            buffers = self.held[codes]
            if scale.numel() != 1 or (scale.item(), int(zero.item())) != (buffers.scale, buffers.zero):
                raise NotImplementedError(f"it reads the codes of {buffers.name!r} with another scale than theirs")
            return buffers
        known = self.constants.find(codes)
        if known is None or known.dtype not in [f.dtype for f in self.formats]:
            raise NotImplementedError(f"its operand {codes} is not {self.spelled(' or ')} codes")
        if known.dtype == torch.int16 and scale.numel() != 1:
            raise NotImplementedError(f"its operand {codes} is int16 with several scales; weights must be int8")
        if known.dtype == torch.int16 or (scale.numel() == 1 and len(stored) > 1):
            return self.constant(str(codes), known, scale.item(), int(zero.item()))
        if bool((zero != 0).any()):
            raise NotImplementedError(f"weights must have zero point 0 in {self.runtime}")
        return Weight(str(codes), known, scale.reshape(-1))

    def constant(self, name: str, codes: Tensor, scale: float, zero: int) -> Codes:
        result = Codes(name, _shape(codes), scale, zero, codes.dtype)
        index = self.file.tensor(name, codes.shape, codes.dtype, ([scale], [zero], 0), codes)
        result.tensors[result.plain] = index
        return result

    def units(self, quantizer: Quantizer, scale: Any, zero: Any) -> tuple[float, int, torch.dtype]:
        """The scale, the zero point and the dtype of codes."""
        its = self.constants.find(scale)
        offset = None if zero is None else self.constants.find(zero)
        if its is None or its.numel() != 1 or (zero is not None and offset is None):
            raise NotImplementedError(f"activations must have one static scale in {self.runtime}")
        if quantizer.format not in self.formats:
            raise NotImplementedError(f"codes are {quantizer.format.name}; supported are {self.spelled(' and ')}")
        return its.item(), quantizer.format.zero if offset is None else int(offset.item()), quantizer.format.dtype


def _shape(x: Tensor) -> tuple[int, ...]:
    if not all(isinstance(n, int) for n in x.shape):
        raise NotImplementedError(f"its sizes {tuple(x.shape)} are not static; export with static ones")
    return tuple(x.shape)
