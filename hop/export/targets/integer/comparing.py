"""Compare a program with the file of another runtime, node by node.

What corresponds:

* outputs, by their position;
* a node and a tensor of its name, as `to_tflite` names them, if they have one scale and zero point;
* codes of one scale and zero point whose shapes have the same sizes, in any order; where several have these, in their
  order, if both sides have as many;
* of the rest, if all calls of hop.scaled have tensors of their names, such a call and that tensor: their scales differ,
  which is said.

A tensor may have its dimensions in another order than the node, as where channels are last. Of the orders that the
sizes allow, it is the one by which the fewest elements differ.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from hop.compat.pytree import Kwargs
from hop.dispatch import compiled
from hop.dispatch.operators import VIEW, of
from hop.export.analysis.arguments import Arguments
from hop.export.analysis.comparison import Comparison, Trial
from hop.export.analysis.metrics import Figures
from hop.export.analysis.running import Runner
from hop.export.rewrite.code_floats import codes_within
from hop.export.rewrite.encodings import dequantizing, quantizing
from hop.export.rewrite.program import constant, value
from hop.export.rewrite.target import Target
from hop.export.targets.integer.graph import FileGraph, FileTensor
from hop.export.targets.integer.trials import Sample, can_be_tried, trials
from hop.numerics.quantizer import Quantizer

_MOST_DIMENSIONS = 5  # up to this number, all orders are tried
_CODES = (torch.int8, torch.uint8, torch.int16)


def run_comparison(
    program: ExportedProgram, runtime: "Runtime", caller: str, given: Sequence[Arguments], targets: Sequence[Target]
) -> Comparison:
    """Run a program and a runtime's file on each input, and compare them; the conventions of `targets` are tried."""
    runner = FileRunner(program, runtime, caller)
    with torch.no_grad():
        for arguments in given:
            runner.run_both(arguments)
    return runner.comparison(len(given), targets)


@dataclass(eq=False)
class _Pair:
    """A node, the corresponding tensor, and their differences."""

    node: Node
    tensor: FileTensor
    caller: str
    views: tuple[Node, ...] = ()  # views of the dequantized node, which the file has of the codes
    order: tuple[int, ...] | None = None
    figures: Figures = field(init=False)

    def __post_init__(self) -> None:
        self.figures = Figures(self.node, self.tensor, caller=self.caller)

    def viewed(self, own: Any) -> Tensor:
        """The codes that correspond to the tensor, from the node's result."""
        codes = own[0] if isinstance(own, list | tuple) else own
        return codes_within(codes, None, [(v.target, list(v.args[1:]), dict(v.kwargs)) for v in self.views])

    def arranged(self, own: Tensor, theirs: Tensor) -> Tensor:
        """The runtime's tensor with its dimensions in the node's order."""
        if self.order is None:
            fitting = [p for p in _orders(own.dim()) if [own.shape[d] for d in p] == list(theirs.shape)]
            if not fitting:
                return theirs
            self.order = min(fitting, key=lambda p: int((own.permute(p) != theirs).sum()))
        return theirs.permute([self.order.index(d) for d in range(len(self.order))])


def _orders(n: int) -> Iterator[tuple[int, ...]]:
    return permutations(range(n)) if n <= _MOST_DIMENSIONS else iter([tuple(range(n))])


class Runtime(Protocol):
    """Runs a file."""

    @property
    def graph(self) -> FileGraph:
        """The tensors and operators of the file."""
        ...

    def run(self, inputs: Sequence[Tensor]) -> None:
        """Run on these tensors, in the order of the file's inputs."""
        ...

    def value(self, tensor: FileTensor) -> Tensor:
        """The value of a tensor after the last run."""
        ...


class FileRunner(Runner):
    """Runs a program and compares its nodes with the tensors of a file."""

    def __init__(self, program: ExportedProgram, runtime: Runtime, caller: str) -> None:
        super().__init__(program, "program", caller)
        self.exported, self.runtime = program, runtime
        specs = zip(self.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True)
        self.inputs = [node for node, spec in specs if spec.kind is InputKind.USER_INPUT]
        own, its = [x for x, _ in self.outputs if isinstance(x, Node)], list(runtime.graph.outputs.values())
        for what, a, b in (("inputs", self.inputs, runtime.graph.inputs), ("outputs", own, its)):
            if len(a) != len(b):
                raise ValueError(
                    f"{caller}: {what} correspond by position, but program has {len(a)} and model {len(b)}; give the "
                    "program of that file"
                )
        self.read = self._input_codes()
        tensors = runtime.graph.tensors
        self.ends = [
            _Pair(node, tensors[i], caller, views)
            for x, i in zip(own, its, strict=True)
            for node, views in [self._compared_output(x, tensors[i])]
        ]
        for i, pair in enumerate(self.ends):
            pair.figures.output = i
        self.pairs: dict[Node, list[_Pair]] | None = None
        self.units: dict[Node, tuple[float, int]] = {}  # scale and zero point of codes, recorded while running
        self.first: dict[Node, list[Sample]] = {}
        self.equal_so_far = True

    # ---- one run

    def run_both(self, arguments: Arguments) -> None:
        self.runtime.run(self._inputs(arguments))
        if self.pairs is None:
            for _ in self.steps(arguments):  # records the units
                pass
            self._match()
        self.equal_so_far, comparing = True, self.pairs
        assert comparing is not None
        for node, output in self.steps(arguments):
            if node.op == "placeholder":
                self.compare(node, output, (), {})

    def run(self, interpreter: fx.Interpreter, node: Node) -> object:
        args, kwargs = interpreter.fetch_args_kwargs_from_env(node) if can_be_tried(node) else ((), {})
        output = interpreter.run_node(node)
        if self.pairs is None:
            self._note(node, output)
        else:
            self.compare(node, output, args, kwargs)
        return output

    def compare(self, node: Node, output: Any, args: Sequence[Any], kwargs: Kwargs) -> None:
        for pair in (self.pairs or {}).get(node, ()):
            result = pair.viewed(output)
            theirs = pair.arranged(result, self.runtime.value(pair.tensor))
            before = pair.figures.differing
            pair.figures.add(result, theirs)
            if pair.figures.differing > before and self.equal_so_far:
                self.equal_so_far = False
                if not pair.views:
                    self.first.setdefault(node, []).append(Sample(args, kwargs, theirs))

    def _inputs(self, arguments: Arguments) -> list[Tensor]:
        """The inputs of the file, from the program's inputs."""
        wanted = dict.fromkeys(self.read)
        for node, output in self.steps_quietly(arguments):
            if node in wanted:
                wanted[node] = output[0] if isinstance(output, list | tuple) else output
            if all(x is not None for x in wanted.values()):
                break
        result = []
        for node, index in zip(self.read, self.runtime.graph.inputs.values(), strict=True):
            tensor, x = self.runtime.graph.tensors[index], wanted[node]
            assert isinstance(x, Tensor)
            fitting = [p for p in _orders(x.dim()) if [x.shape[d] for d in p] == list(tensor.shape)]
            if tensor.is_bound and x.dim() == len(tensor.shape):
                is_within = all(n <= m for n, m in zip(x.shape, tensor.shape, strict=True))
                fitting = [tuple(range(x.dim()))] if is_within else []
            if not fitting or x.dtype != tensor.dtype:
                raise ValueError(
                    f"{self.caller}: the input {node.name!r} is {x.dtype} of {tuple(x.shape)}, but the file's "
                    f"{tensor.name!r} is {tensor.dtype} of {tensor.shape}; give the program of that file"
                )
            result.append(x.permute(fitting[0]))
        return result

    def steps_quietly(self, arguments: Arguments) -> Iterator[tuple[Node, Any]]:
        """`steps` without comparisons."""
        kept, self.pairs = self.pairs, {}
        try:
            yield from self.steps(arguments)
        finally:
            self.pairs = kept

    # ---- correspondence

    def _input_codes(self) -> list[Node]:
        """For each input of the file, the node whose value it gets: the program's input, or its codes."""
        nodes = []
        for node, index in zip(self.inputs, self.runtime.graph.inputs.values(), strict=True):
            if self.runtime.graph.tensors[index].dtype in _CODES:
                node = next((user for user in node.users if _quantizes(user)), node)
            nodes.append(node)
        return nodes

    def _compared_output(self, node: Node, tensor: FileTensor) -> tuple[Node, tuple[Node, ...]]:
        """The node to compare with an output of the file, codes or their dequantized values, and the views of it."""
        views: tuple[Node, ...] = ()
        if tensor.dtype is not None and tensor.dtype.is_floating_point:
            return node, views
        output = node
        while True:
            if of(node.target).family is VIEW and value(node).dtype.is_floating_point:
                node, views = node.args[0], (node, *views)  # type: ignore[assignment]
            elif node.target is compiled.operators["hop_dequantize_buffers"]:
                node = node.args[1][0]  # type: ignore[index,assignment]
            elif (e := dequantizing(node)) is not None:
                node = e.tensor
            elif getattr(node.target, "__name__", "") == "getitem" and can_be_tried(node.args[0]):  # type: ignore[arg-type]
                node = node.args[0]  # type: ignore[assignment]
            else:
                break
        its = value(node)
        if tensor.dtype in _CODES and isinstance(its, Tensor) and its.dtype.is_floating_point:
            raise ValueError(
                f"{self.caller}: the output {output.name!r} is {its.dtype} computed by {node.name!r}, not dequantized "
                f"codes, but the file's {tensor.name!r} is {tensor.dtype}; give the program of that file"
            )
        return node, views

    def _note(self, node: Node, output: Any) -> None:
        """Record the scale and the zero point of codes."""
        if can_be_tried(node) or node.target is compiled.operators["hop_quantize_buffers"]:
            _, scale, *zero = output
            if scale.numel() == 1:
                text = str(node.args[1 if can_be_tried(node) else 0])
                self.units[node] = float(scale), int(zero[0]) if zero else Quantizer.parse(text).format.zero
        elif (e := quantizing(node)) is not None:
            units = [self._number(x) for x in (e.scale, e.zero_point)]
            if None not in units:
                self.units[node] = float(torch.tensor(units[0])), int(units[1])  # type: ignore[arg-type]
        elif of(node.target).family is VIEW and isinstance(output, Tensor) and output.dtype in _CODES:
            source: Any = node.args[0]
            source = source.args[0] if getattr(source.target, "__name__", "") == "getitem" else source
            if source in self.units:
                self.units[node] = self.units[source]

    def _number(self, x: Any) -> Any:
        if not isinstance(x, Node):
            return 0 if x is None else x
        known = constant(self.exported, x)
        return known.item() if known is not None and known.numel() == 1 else None

    def _match(self) -> None:
        ends = {pair.tensor.index for pair in self.ends}
        written = [self.runtime.graph.tensors[i] for op in self.runtime.graph.operators for i in op.outputs]
        free = [t for t in written if t.index not in ends]
        given = {*_taken(self.ends)[0], *self.read}  # the file's inputs are the codes of the latter
        nodes = [n for n in self.units if n not in given]
        pairs = list(self.ends)
        by_name = {t.name: t for t in free}
        named = [
            _Pair(n, by_name[n.name], self.caller)
            for n in nodes
            if n.name in by_name and sorted(_sizes(n)) == sorted(by_name[n.name].shape)
        ]
        keeps_units = any(t.units is not None for t in self.runtime.graph.tensors)
        pairs += [pair for pair in named if not keeps_units or pair.tensor.units == self.units[pair.node]]
        pairs += self._alike(nodes, free, pairs)
        if {n for n in nodes if can_be_tried(n)} <= {
            pair.node for pair in (*named, *self.ends)
        }:  # to_tflite wrote the file
            taken = _taken(pairs)
            rest = [pair for pair in named if can_be_tried(pair.node)]
            pairs += [pair for pair in rest if pair.node not in taken[0] and pair.tensor.index not in taken[1]]
        self.pairs = {}
        for pair in pairs:
            self.pairs.setdefault(pair.node, []).append(pair)

    def _alike(self, own: Sequence[Node], free: Sequence[FileTensor], pairs: Sequence[_Pair]) -> list[_Pair]:
        """Pair the remaining nodes and tensors with equal units and sizes."""
        taken = _taken(pairs)
        alike: dict[Any, tuple[list[Node], list[FileTensor]]] = defaultdict(lambda: ([], []))
        for node in own:
            if node not in taken[0]:
                alike[self.units[node], tuple(sorted(_sizes(node)))][0].append(node)
        for t in free:
            if t.index not in taken[1] and t.units is not None:
                alike[t.units, tuple(sorted(t.shape))][1].append(t)
        return [
            _Pair(n, t, self.caller)
            for nodes, tensors in alike.values()
            if len(nodes) == len(tensors)
            for n, t in zip(nodes, tensors, strict=True)
        ]

    # ---- the result

    def comparison(self, count: int, targets: Sequence[Target]) -> Comparison:
        places = {node: i for i, node in enumerate(self.graph.nodes)}
        pairs = [pair for own in (self.pairs or {}).values() for pair in own if pair.figures.elements is not None]
        pairs.sort(key=lambda pair: places[pair.node])
        first = min(self.first, key=lambda node: places[node], default=None)
        tried: tuple[Trial, ...] = ()
        if first is not None and can_be_tried(first):
            tried = trials(first, self.first[first], targets)
        units = [(p.node.name, self.units.get(p.node), p.tensor.units) for p in pairs]
        nodes, tensors = {p.node for p in pairs}, {p.tensor.index for p in pairs}
        written = {i for op in self.runtime.graph.operators for i in op.outputs}
        return Comparison(
            tuple(pair.figures.row() for pair in pairs),
            len([n for n in self.units if n not in nodes]),
            len(written - tensors),
            count,
            tried,
            tuple((n, a, b) for n, a, b in units if a is not None and b is not None and a != b),
        )


def _taken(pairs: Sequence[_Pair]) -> tuple[set[Node], set[int]]:
    """The nodes and tensors that pairs compare; a node of which a view is compared may have another tensor."""
    return {pair.node for pair in pairs if not pair.views}, {pair.tensor.index for pair in pairs}


def _quantizes(node: Node) -> bool:
    return node.target is compiled.operators["hop_quantize_buffers"] or quantizing(node) is not None


def _sizes(node: Node) -> list[int]:
    value = node.meta["val"]
    return list((value[0] if isinstance(value, list | tuple) else value).shape)
