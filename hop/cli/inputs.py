"""Load programs and their inputs from files.

torch.export.load is not safe on untrusted files: it unpickles tensor subclasses and example inputs, and evaluates sizes
written as text, both of which can execute any code. Input data are read only from formats that contain nothing but
numbers.
"""

import importlib
import logging
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx import Node

from hop.cli import data
from hop.cli.output import quietly
from hop.compat import export
from hop.compat.pytree import tree_leaves, tree_unflatten
from hop.export.analysis.arguments import Arguments
from hop.export.rewrite.program import value

Inputs = list[Arguments]


# ---- programs


def load_program(path: str | Path) -> ExportedProgram:
    """Load a program that torch.export.save wrote. Only for trusted files, see the module docstring.

    Raises:
        OSError: the file does not exist or cannot be read.
        ValueError: the file is not a program, was saved by an incompatible version, or calls operators that are not
            available.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            _register(archive)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is not a program saved by torch.export.save: {error}") from error
    with path.open("rb") as file, _first_failure() as failures:
        try:
            program = torch.export.load(file)
        except _FAILURES as error:
            reason = failures[0] if failures else error
            words = str(reason).strip().split("\n")[0] or type(reason).__name__
            raise ValueError(f"{path} cannot be read as an exported program: {words}") from reason
    return program


_FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    *(EOFError, UnpicklingError, zipfile.BadZipFile),
)


def _register(archive: zipfile.ZipFile) -> None:
    """Import the libraries that define a program's operators, its quantize and dequantize nodes, and its input and
    output classes.
    """
    for name in archive.namelist():
        if "/models/" in name and name.endswith(".json"):
            text = archive.read(name)
            if b"quantized_decomposed" in text:
                export.quantized_decomposed("quantize_per_tensor")
            if b"torchao" in text:
                _import("torchao.quantization", "calls operators")
            for module in sorted(set(_CLASSES.findall(text))):
                _import(module.decode(), "takes or returns classes")


# Matches JSON nested in a JSON string. Only modules that define caches and outputs of models are imported, because
# importing an arbitrary module would run code that the file chose.
_CLASSES = re.compile(
    rb'\\"type\\": \\"(transformers\.(?:modeling_outputs|cache_utils|models(?:\.\w+)+\.modeling_\w+))\.\w+\\"'
)


def _import(module: str, what: str) -> None:
    package = module.partition(".")[0]
    try:
        with quietly():
            importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"the program {what} of {module}, which cannot be imported ({error}): pip install {package}"
        ) from error


@contextmanager
def _first_failure() -> Iterator[list[BaseException]]:
    """Collect the exceptions that torch.export.load logs instead of raising, in a list."""
    failures: list[BaseException] = []

    def keep(record: logging.LogRecord) -> bool:
        if isinstance(record.exc_info, tuple) and record.exc_info[1] is not None:
            failures.append(record.exc_info[1])
        return False

    logger = logging.getLogger("torch.export")
    logger.addFilter(keep)
    try:
        yield failures
    finally:
        logger.removeFilter(keep)


# ---- their inputs


class ProgramInput(NamedTuple):
    """An input of a program."""

    name: str
    node: Node
    constant: Any  # the value that a non-tensor input was specialized to
    example: Any  # the example input, or None if the file has none


def load_inputs(program: ExportedProgram, path: str | Path | None = None, *, seed: int = 0) -> Inputs:
    """The arguments of one or several runs of a program.

    Args:
        program: the program.
        path: a .npz or .safetensors file. An input is looked up by its name in the program or by its position: "0", or
            "arr_0" as numpy.savez writes. Arrays with one more leading dimension hold several inputs. Default: random
            inputs, see `random_inputs`.
        seed: of random inputs.

    Raises:
        OSError: the file does not exist or cannot be read.
        ValueError: the file does not match the program's inputs, or an input can be neither read nor randomly
            generated.
    """
    wanted = inputs_of(program)
    if path is None:
        return [_arguments(program, random_inputs(wanted, seed))]
    content = data.read(Path(path))
    values = {w.name: _read_value(content, i, w, path) for i, w in enumerate(wanted) if w.constant is None}
    counts = {len(v) for w in wanted if (v := values.get(w.name)) is not None and v.dim() == _dims(w) + 1}
    if len(counts) > 1:
        raise ValueError(f"{path}: arrays have different numbers of inputs: {sorted(counts)}")
    result = []
    for i in range(counts.pop() if counts else 1):
        leaves = []
        for w in wanted:
            x = values.get(w.name)
            leaves.append(w.constant if x is None else x[i] if x.dim() > _dims(w) else x)
        result.append(_arguments(program, leaves))
    return result


def inputs_of(program: ExportedProgram) -> list[ProgramInput]:
    """The inputs of a program, in order."""
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    examples = tree_leaves(program.example_inputs) if program.example_inputs is not None else []
    specs = [s for s in program.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
    examples = examples if len(examples) == len(specs) else [None] * len(specs)
    return [
        ProgramInput(
            s.arg.name, nodes[s.arg.name], s.arg.value if isinstance(s.arg, ConstantArgument) else None, example
        )
        for s, example in zip(specs, examples, strict=True)
    ]


def random_inputs(wanted: list[ProgramInput], seed: int = 0) -> list[Any]:
    """Random inputs of the sizes that a program was exported with.

    Floats are normally distributed. Integers of 8 and 16 bits cover their range. Wider ones are 0 or 1, like masks,
    unless they index a table such as an embedding's; then they cover its rows. Booleans are 0 or 1.
    """
    generator = torch.Generator().manual_seed(seed)
    return [_random_value(w, generator) for w in wanted]


def _random_value(w: ProgramInput, generator: torch.Generator) -> Any:
    val = value(w.node)
    if w.constant is not None or not isinstance(val, Tensor):
        return w.constant if w.constant is not None else w.example
    shape = w.example.shape if isinstance(w.example, Tensor) else [_hint(n, w.name) for n in val.shape]
    if val.dtype.is_floating_point or val.dtype.is_complex:
        wide = torch.float64 if val.dtype == torch.float64 else torch.float32
        result = torch.randn(shape, generator=generator, dtype=val.dtype if val.dtype.is_complex else wide)
    else:
        low, high = 0, _indexed_rows(w.node)
        if val.dtype != torch.bool and (info := torch.iinfo(val.dtype)).bits <= 16:
            low, high = info.min, info.max + 1
        result = torch.randint(low, high, shape, generator=generator)
    return result.to(dtype=val.dtype, device=val.device)


def _hint(size: Any, name: str) -> int:
    if isinstance(size, int):
        return size
    if (hint := size.node.hint) is None:
        raise ValueError(f"the program does not record the sizes of {name!r}; pass it as data")
    return int(hint)


_MOVES = (
    "_to_copy",
    "to",
    "view",
    "reshape",
    "expand",
    "slice",
    "unsqueeze",
    "squeeze",
    "clone",
    "contiguous",
    "alias",
)


def _indexed_rows(node: Node) -> int:
    """The smallest number of rows of the tables that a node's integers index; 2 if there are none."""
    counts = []
    for user in node.users:
        args = list(user.args)
        words = str(args[0] if str(user.target).startswith("hop_") else user.target).split(".")
        tensors = [a for a in args if isinstance(a, Node) and isinstance(value(a), Tensor)]
        indices = [a for a in tensors[1:] + [x for a in args if isinstance(a, list | tuple) for x in a] if a is node]
        if len(words) > 1 and words[1] in ("embedding", "index_select", "index") and indices:
            dim = args[1] if words[1] == "index_select" else 0
            counts.append(int(_hint(value(tensors[0]).shape[dim], node.name)))
        elif len(words) > 1 and words[1] in _MOVES and tensors[0] is node and (rows := _indexed_rows(user)) > 2:
            counts.append(rows)
    return min(counts, default=2)


# ---- from a file


def _read_value(tensors: Mapping[str, Tensor], position: int, w: ProgramInput, path: str | Path) -> Tensor:
    names = (w.name, str(position), f"arr_{position}")
    result = next((tensors[n] for n in names if n in tensors), None)
    if result is None:
        raise ValueError(
            f"{path} lacks {w.name!r}, input {position} of the program; it has {', '.join(tensors) or 'nothing'}"
        )
    val = value(w.node)
    if not isinstance(val, Tensor):
        raise ValueError(
            f"input {position} of the program, {w.name!r}, is not a tensor, so it cannot be read from a file"
        )
    if result.dtype != val.dtype:
        raise ValueError(f"{path}: {w.name!r} is {result.dtype}, but the program takes {val.dtype}")
    sizes = result.shape[max(result.dim() - val.dim(), 0) :]
    fits = all(not isinstance(n, int) or n == its for n, its in zip(val.shape, sizes, strict=False))
    if result.dim() - val.dim() not in (0, 1) or not fits:
        shape = ", ".join(map(str, val.shape))
        raise ValueError(
            f"{path}: {w.name!r} has shape {tuple(result.shape)}, but the program takes ({shape}), optionally stacked "
            "along one more leading dimension"
        )
    return result.to(val.device)


def _dims(w: ProgramInput) -> int:
    return value(w.node).dim()


def _arguments(program: ExportedProgram, tensors: Sequence[object]) -> Arguments:
    spec = program.call_spec.in_spec
    args, kwargs = tree_unflatten(tensors, spec) if spec is not None else (tensors, {})
    return Arguments(tuple(args), kwargs)
