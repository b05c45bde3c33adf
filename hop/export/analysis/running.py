"""Run two programs side by side: each value is compared as soon as both have it, and then dropped."""

from collections.abc import Iterator

from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx import GraphModule, Node

from hop.compat.eager import OpOverload
from hop.compat.pytree import tree_flatten, tree_leaves
from hop.export.analysis.arguments import Arguments, placed
from hop.export.analysis.metrics import Figures
from hop.numerics.spelling import shown


class Runner:
    """Runs a program one node at a time."""

    def __init__(self, program: object, name: str, caller: str = "verify") -> None:
        if not isinstance(program, ExportedProgram | GraphModule):
            raise TypeError(
                f"{caller}: {name} must be a torch.export.ExportedProgram or its module(), got {shown(program)}; make "
                "one with torch.export.export"
            )
        self.program, self.name, self.caller = program, name, caller
        self.module = program.graph_module if isinstance(program, ExportedProgram) else program
        self.graph = self.module.graph
        self.writes = any(isinstance(n.target, OpOverload) and n.target._schema.is_mutable for n in self.graph.nodes)
        results = tree_leaves(self.graph.output_node().args[0])
        if isinstance(program, ExportedProgram):
            specs = program.graph_signature.output_specs
            results = [x for x, spec in zip(results, specs, strict=True) if spec.kind is OutputKind.USER_OUTPUT]
        self.outputs: list[tuple[object, str | None]] = [(x, None) for x in results]  # node, buffer name
        last: dict[Node, Node] = {}
        for node in self.graph.nodes:
            last |= dict.fromkeys(node.all_input_nodes, node)
        self.done_after: dict[Node, list[Node]] = {}
        for node, user in last.items():
            self.done_after.setdefault(user, []).append(node)

    def steps(self, arguments: Arguments) -> Iterator[tuple[Node, object]]:
        """Yield each node with its value, in order; a value is dropped after the last node that reads it."""
        interpreter = fx.Interpreter(self.module)
        interpreter.env = self._given(arguments)
        for node in self.graph.nodes:
            if node.op == "output":
                return
            if node.op != "placeholder":
                output = self.run(interpreter, node)
                interpreter.env[node] = self._own(output) if node.op == "get_attr" else output
            yield node, interpreter.env[node]
            for dead in self.done_after.get(node, []):
                del interpreter.env[dead]

    def run(self, interpreter: fx.Interpreter, node: Node) -> object:
        """Compute the value of a node from its operands in `interpreter.env`."""
        return interpreter.run_node(node)

    def _given(self, arguments: Arguments) -> dict[Node, object]:
        placed_inputs = placed(self.program, arguments, self.caller, self.name)
        placeholders = self.graph.find_nodes(op="placeholder")
        if not isinstance(self.program, ExportedProgram):
            values = (
                tree_leaves((placed_inputs.args, placed_inputs.kwargs))
                if placed_inputs.kwargs
                else self.graph.process_inputs(*placed_inputs.args)
            )
            self._check(len(placeholders), len(values))
            return dict(zip(placeholders, map(self._own, values), strict=True))
        leaves, spec = tree_flatten((placed_inputs.args, placed_inputs.kwargs))
        specs = self.program.graph_signature.input_specs
        wanted = sum(s.kind is InputKind.USER_INPUT for s in specs)
        self._check(wanted, len(leaves))
        if self.program.call_spec.in_spec not in (None, spec):
            raise ValueError(
                f"{self.caller}: the inputs are nested as {spec}, but {self.name} was exported for "
                f"{self.program.call_spec.in_spec}"
            )
        rest, state, constants = iter(leaves), self.program.state_dict, self.program.constants
        env: dict[Node, object] = {}
        for node, s in zip(placeholders, specs, strict=True):
            if s.kind is InputKind.USER_INPUT:
                value = next(rest)
                value = s.arg.value if isinstance(s.arg, ConstantArgument) else value
            elif s.target in state:
                value = state[s.target]
            elif s.target in constants:
                value = constants[s.target]
            else:
                raise ValueError(
                    f"{self.caller}: {self.name} has an input of kind {s.kind.name}, {node.name}, without a value"
                )
            env[node] = self._own(value)
        return env

    def _check(self, wanted: int, got: int) -> None:
        if wanted != got:
            raise ValueError(
                f"{self.caller}: {self.name} takes {wanted} tensors or numbers, but inputs have {got}; give as many"
            )

    def _own(self, x: object) -> object:
        """A copy of `x` if the program may write to it."""
        return x.detach().clone() if self.writes and isinstance(x, Tensor) else x


def compare(
    a: Runner, b: Runner, arguments: Arguments, figures: list["Figures"], output_figures: list["Figures"]
) -> None:
    """Run both programs on one input and add the differences to all figures."""
    waiting = [f for f in dict.fromkeys([*figures, *output_figures]) if not f.dropped]
    by_a: dict[object, list[Figures]] = {}
    by_b: dict[object, list[Figures]] = {}
    for f in waiting:
        by_a.setdefault(f.a, []).append(f)
        by_b.setdefault(f.b, []).append(f)
    left: dict[Figures, object] = {}
    right: dict[Figures, object] = {}
    other = b.steps(arguments)

    def kept(runner: Runner, value: object) -> object:
        """The value, copied if the program may write to it later."""
        return value.clone() if runner.writes and isinstance(value, Tensor) else value

    def read_b(until: "Figures") -> None:
        while until not in right:
            node, value = next(other)
            for f in by_b.get(node, ()):
                right[f] = kept(b, value)

    for node, value in a.steps(arguments):
        for f in by_a.get(node, []):
            if isinstance(f.b, Node):
                left[f] = kept(a, value)
                read_b(f)
                f.add(left.pop(f), right.pop(f))
            else:
                f.add(value, f.b)
    for f in waiting:
        if not isinstance(f.a, Node):
            if isinstance(f.b, Node):
                read_b(f)
            f.add(f.a, right.pop(f, f.b))


def figures_of_outputs(a: Runner, b: Runner, figures: list["Figures"]) -> list["Figures"]:
    """The figures of the outputs, shared with a pair of `figures` if both outputs are its nodes."""
    known = {(f.a, f.b): f for f in figures}
    result = []
    for i, ((x, part_x), (y, part_y)) in enumerate(zip(a.outputs, b.outputs, strict=True)):
        nodes = isinstance(x, Node) and isinstance(y, Node) and part_x is None and part_y is None
        f = known.get((x, y)) if nodes else None
        if f is None or f.output is not None:
            f = Figures(x, y, (part_x, part_y))
        f.output = i
        result.append(f)
    return result
