"""compare: measure a program node by node, optionally against a reference."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from hop.compat.pytree import tree_leaves, tree_map
from hop.export.analysis.arguments import Arguments, Data, parse
from hop.export.analysis.running import compare as run_both
from hop.numerics.spelling import shown
from hop.report.listing import parameter_bytes, rows_of
from hop.report.measuring import Meter, Pair, Progress
from hop.report.pairing import pairs
from hop.report.report import Report

Program = ExportedProgram | GraphModule


def compare(
    model: Program | nn.Module,
    reference: Program | nn.Module | None = None,
    data: Data | None = None,
    *,
    runs: int = 3,
    name: str = "",
    progress: Progress | None = None,
) -> Report:
    """Run a model and measure each value that it computes, against a reference if one is given.

    Args:
        model: an exported program, its `module()`, or a module, which is exported with `data`.
        reference: the same for the reference, usually the float model; it must take the same inputs.
        data: a tuple of positional arguments for both, a dict of arguments by name, or a list of such tuples or dicts.
            Default: the example inputs that a program was exported with.
        runs: number of timed runs, on the first arguments.
        name: the model's name in the report.
        progress: called with the current activity, the number of steps done and the number of steps in total.

    Returns:
        A Report with one row per value.

    Raises:
        TypeError: `model` or `reference` is neither a program nor a module, or `data` is not a tuple, a dict or a list
            of these.
        ValueError: there are no inputs, they do not fit a program, or `runs` is below 1.
    """
    check_count("compare: runs", runs, 3)
    check_function("compare: progress", progress)
    given = inputs_of("compare", data, {"model": model} | ({} if reference is None else {"reference": reference}))
    tell = progress or _no_progress
    a = Meter(exported("compare", model, given), "model", "compare")
    b = None if reference is None else Meter(exported("compare", reference, given), "reference", "compare")
    node_pairs = [] if b is None else [Pair(x, y, caller="compare") for x, y in pairs(a.graph, b.graph)]
    total, done = len(given) + runs, 0
    with torch.no_grad():
        for arguments in given:
            tell("looking at values", done, total)
            if b is None:
                for _ in a.steps(arguments):
                    pass
            else:
                run_both(a, b, arguments, list(node_pairs), [])
            done += 1
        for _ in range(runs):
            tell("taking times", done, total)
            a.time(given[0])
            done += 1
    tell("taking times", done, total)
    return Report(rows_of(a, node_pairs), len(given), b is not None, parameter_bytes(a), name)


def check_count(what: str, count: object, such: int) -> None:
    """Raise ValueError unless `count` is an integer of at least 1."""
    if type(count) is not int or count < 1:
        raise ValueError(f"{what} must be an integer of at least 1, got {count!r}; give one such as {such}")


def check_function(what: str, function: object) -> None:
    """Raise TypeError unless `function` is callable or None."""
    if function is not None and not callable(function):
        raise TypeError(f"{what} must be a function, got {function!r}; leave it out")


def inputs_of(caller: str, data: Data | None, models: Mapping[str, object]) -> list[Arguments]:
    """The arguments of each run. `models` maps the argument names used in errors to the models."""
    for name, model in models.items():
        if not isinstance(model, Program | nn.Module):
            raise TypeError(
                f"{caller}: {name} must be a torch.export.ExportedProgram, its module() or a torch.nn.Module; got "
                f"{shown(model)}; make one with torch.export.export"
            )
    if data is None:
        kept = (m.example_inputs for m in models.values() if isinstance(m, ExportedProgram))
        recorded = next((inputs for inputs in kept if inputs is not None), None)
        if recorded is None:
            raise ValueError(f"{caller}: data is None, and no program keeps its arguments; pass some")
        return [Arguments(*recorded)]
    return parse(caller, "data", data)


def exported(caller: str, model: Program | nn.Module, data: list[Arguments]) -> Program:
    """`model` as a program; a module is exported, with dynamic sizes wherever the inputs in `data` differ."""
    if isinstance(model, Program):
        return model
    args, kwargs = data[0].args, dict(data[0].kwargs)
    if any(set(x.kwargs) != set(kwargs) for x in data):
        raise ValueError(f"{caller}: data has arguments of different names: {', '.join(dict.fromkeys(map(str, data)))}")
    leaves = [tree_leaves((x.args, [x.kwargs[name] for name in kwargs])) for x in data]
    if len({len(x) for x in leaves}) != 1:
        raise ValueError(f"{caller}: data has different numbers of tensors from one run to the next")
    columns = iter(zip(*leaves, strict=True))

    def shape(_: object) -> dict[int, Any] | None:
        return _dynamic_shape(next(columns))

    with torch.no_grad():
        by_place, by_name = tree_map(shape, (args, kwargs))
        return torch.export.export(model, args, kwargs, dynamic_shapes=by_name if kwargs else by_place)


def _no_progress(what: str, done: int, of: int) -> None:
    """The default progress callback: do nothing."""


def _dynamic_shape(column: tuple[Any, ...]) -> dict[int, Any] | None:
    """The dynamic dimensions of one input: those whose size differs between runs."""
    if not isinstance(column[0], Tensor):
        return None
    sizes = zip(*(x.shape for x in column), strict=True)
    return {i: Dim.AUTO for i, of in enumerate(sizes) if len(set(of)) > 1} or None
