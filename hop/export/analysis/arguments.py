"""Arguments of programs: positional, by name, or both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.export import ExportedProgram
from torch.fx import GraphModule

from hop.compat.pytree import Args, TreeSpec
from hop.compat.tracing import nesting
from hop.numerics.spelling import shown


@dataclass(frozen=True)
class Arguments:
    """The arguments of one run."""

    args: Args = ()
    kwargs: Mapping[str, object] = field(default_factory=dict[str, object])

    def __str__(self) -> str:
        by_place = [f"{len(self.args)} by place"] if self.args else []
        return " and ".join([*by_place, *([", ".join(f"{n}=" for n in self.kwargs)] if self.kwargs else [])]) or "none"


One = Args | Mapping[str, object] | Arguments
Data = One | Sequence[One]
"""A tuple of positional arguments, a dict of arguments by name, or a list of these."""


def parse(caller: str, name: str, data: object) -> list[Arguments]:
    """Parse `data` as users pass it into the arguments of each run.

    Raises:
        TypeError: it is not a tuple, a dict with string keys, or a list of these.
        ValueError: it is an empty list.
    """
    several = isinstance(data, Sequence) and not isinstance(data, tuple)
    given: list[object] = list(data) if isinstance(data, Sequence) and several else [data]
    parsed = [_parse_one(x) for x in given]
    whole = [x for x in parsed if x is not None]
    if len(whole) != len(parsed):
        wrong = parsed.index(None)
        place, x = f" at {wrong}" if several else "", given[wrong]
        got = f"a dict with the keys {list(x)}" if isinstance(x, Mapping) else shown(x)
        raise TypeError(
            f"{caller}: {name} must be the tuple of a program's positional arguments, a dict of arguments by name, or "
            f"a list of such tuples or dicts; got {got}{place}; give (x,) for one tensor"
        )
    if not whole:
        raise ValueError(
            f"{caller}: {name} must hold one tuple or dict of arguments or more, got an empty list, []; give "
            "(x,) for one tensor"
        )
    return whole


def _parse_one(x: object) -> Arguments | None:
    if isinstance(x, tuple):
        return Arguments(x)
    if isinstance(x, Mapping):
        named = dict(x)
        return Arguments((), named) if all(isinstance(n, str) for n in named) else None
    return x if isinstance(x, Arguments) else None


def placed(program: ExportedProgram | GraphModule, given: Arguments, caller: str, name: str) -> Arguments:
    """The arguments with each passed by position or by name as the program was exported.

    Raises:
        ValueError: the arguments do not fit the program, which the error calls `name`.
    """
    spec, names = _signature(program)
    by_place, keys = (len(names), []) if spec is None else (spec.child(0).num_children, list(spec.child(1).context))
    args, rest = list(given.args), dict(given.kwargs)
    if not keys and not rest:
        return given
    while len(args) < by_place and names[len(args)] in rest:
        args.append(rest.pop(names[len(args)]))
    if len(args) != by_place or set(rest) != set(keys):
        wanted = ", ".join([*names[:by_place], *(f"{key}=" for key in keys)])
        raise ValueError(
            f"{caller}: {name} takes the arguments {wanted}, but inputs have {given}; give a dict of all by name"
        )
    return Arguments(tuple(args), {key: rest[key] for key in keys})


def named(program: ExportedProgram, given: Arguments) -> Arguments:
    """The arguments all by name if each has one, for programs that may have been exported with another convention."""
    _, names = _signature(program)
    own = names[: len(given.args)]
    if len(own) + len(given.kwargs) != len(names) or len(set(names)) != len(names):
        return given
    return Arguments((), {**dict(zip(own, given.args, strict=True)), **given.kwargs})


def _signature(program: ExportedProgram | GraphModule) -> tuple[TreeSpec | None, list[str]]:
    """The pytree spec of the arguments, or None for flat ones, and their names."""
    spec: TreeSpec | None
    if isinstance(program, ExportedProgram):
        signature = program.module_call_graph[0].signature if program.module_call_graph else None
        spec, names = program.call_spec.in_spec, None if signature is None else signature.forward_arg_names
    else:
        info = nesting(program.graph)
        spec, names = (None, None) if info is None else (info.in_spec, info.orig_args)
    if spec is None or [part.type for part in spec.children()] != [tuple, dict]:
        return None, [str(node.target) for node in program.graph.find_nodes(op="placeholder")]
    by_place, by_name = spec.children()
    return spec, list(names or [*(f"argument {i}" for i in range(by_place.num_children)), *by_name.context])
