"""Measurements of running programs: per node of one program, and per pair of nodes of two."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from hop.compat.pytree import tree_leaves
from hop.dispatch.hop import Hop
from hop.export.analysis.arguments import Arguments
from hop.export.analysis.metrics import Figures
from hop.export.analysis.running import Runner
from hop.report.spread import Spread
from hop.report.values import Type, float_values, type_of

Progress = Callable[[str, int, int], None]  # current activity, steps done, steps in total


@dataclass(eq=False)
class NodeMeasurements:
    """Measurements of one node."""

    type: Type | None = None
    shape: tuple[int, ...] = ()
    values: Spread | None = None
    bytes: int = 0
    explained: str = ""
    seconds: list[float] = field(default_factory=list[float])

    def add(self, x: object) -> None:
        """Record one value of the node."""
        first = cast(Sequence[Any], x)[0] if isinstance(x, list | tuple) and x else cast(Any, x)
        if self.type is None and isinstance(first, Tensor):
            self.type, self.shape = type_of(first), tuple(first.shape)
            self.bytes = sum(t.nbytes for t in tree_leaves(x) if isinstance(t, Tensor))
        given = float_values(x)
        if given is not None:
            spread = Spread.of(given)
            self.values = spread if self.values is None else self.values + spread


class Meter(Runner):
    """Runs a program and records each value that it computes, or the time that each node takes."""

    def __init__(self, program: object, name: str, caller: str) -> None:
        super().__init__(program, name, caller)
        self.seen: dict[Node, NodeMeasurements] = {node: NodeMeasurements() for node in self.graph.nodes}
        self.times = False  # whether to record times instead of values
        given = [n for n in self.graph.nodes if n.op == "placeholder"]
        if isinstance(program, ExportedProgram):
            specs = zip(given, program.graph_signature.input_specs, strict=True)
            given = [node for node, spec in specs if spec.kind is InputKind.USER_INPUT]
        self.inputs: frozenset[Node] = frozenset(given)

    def steps(self, arguments: Arguments) -> Any:
        for node, value in super().steps(arguments):
            seen = self.seen[node]
            if not self.times and (node in self.inputs or node.op == "call_function" or seen.type is None):
                seen.add(value)
            yield node, value

    def run(self, interpreter: fx.Interpreter, node: Node) -> object:
        seen = self.seen[node]
        if not self.times:
            if isinstance(node.target, Hop) and not seen.explained:
                args, kwargs = interpreter.fetch_args_kwargs_from_env(node)
                seen.explained = node.target.explain(*args, **kwargs)
            return super().run(interpreter, node)
        start = time.perf_counter()
        result = super().run(interpreter, node)
        if isinstance(result, Tensor) and result.is_cuda:
            torch.cuda.synchronize(result.device)
        seen.seconds.append(time.perf_counter() - start)
        return result

    def time(self, arguments: Arguments) -> None:
        """Run once and record times."""
        self.times = True
        for _ in self.steps(arguments):
            pass
        self.times = False

    def seconds(self, node: Node) -> float | None:
        taken = self.seen[node].seconds
        return statistics.median(taken) if taken else None


@dataclass(eq=False)
class Pair(Figures):
    """A node, its counterpart in the reference, and a histogram of their differences."""

    spread: Spread | None = None

    def add(self, x: object, y: object) -> None:
        super().add(y, x)  # the signal is the reference's
        values, wanted = float_values(x), float_values(y)
        if values is not None and wanted is not None and values.shape == wanted.shape:
            spread = Spread.of(values - wanted.to(values.device))
            self.spread = spread if self.spread is None else self.spread + spread
