"""vectors: write golden vectors, the inputs, sums and outputs of each node, to a folder that needs no torch to read."""

import json
import os
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from hop.compat.files import is_temporary, whole_file, whole_folder, write_whole
from hop.compat.pytree import tree_leaves
from hop.export.analysis.arguments import Arguments, Data, parse
from hop.export.analysis.running import Runner
from hop.export.golden.arrays import Arrays
from hop.export.rewrite.program import check_program, value
from hop.numerics.spelling import JsonObject

FORMAT = 1
_EXTRA_FILES = ("README.md", "hop_vectors.py", "hop_vectors.h")
_PASS_THROUGH = ("getitem", "detach.default", "alias.default", "_assert_tensor_metadata.default")


def vectors(program: ExportedProgram, folder: str | Path, inputs: Data) -> list[str]:
    """Run a program and write golden vectors of each node: codes, scales, zero points, exact sums, multipliers and
    shifts, ranges, outputs.

    The folder has a .npz file for each node that depends on an input, in execution order; `vectors.json` with the list
    of nodes; readers in Python (needs numpy only) and C99; and a README that describes each array. Calls of our
    operators are first decomposed into calls on codes and scales, as in lowering.

    Args:
        program: an exported program.
        folder: a folder to create, or an empty one. All files appear in it together, at the end.
        inputs: a tuple of the program's positional arguments, or a dict of its arguments by name.

    Returns the names of the written nodes.

    Raises:
        TypeError: `program` is not an ExportedProgram, or `inputs` is neither a tuple nor a dict.
        ValueError: there are several inputs, or they do not fit the program.
        FileExistsError: `folder` has files, perhaps from another process, or is a file.
        ImportError: numpy is not installed.
    """
    check_program(program, "vectors")
    try:
        import numpy  # pyright: ignore[reportUnusedImport]  # noqa: F401
    except ImportError as error:
        raise ImportError("vectors needs numpy: pip install numpy") from error
    given = parse("vectors", "inputs", inputs)
    if len(given) != 1:
        raise ValueError(f"vectors: inputs must be those of one run, got {len(given)}; write one folder per run")
    path = Path(folder)
    with whole_folder(path, lambda: _check_empty(path)) as staged:
        return _write(_Recorder(program.run_decompositions({})), given[0], staged)


def _check_empty(path: Path) -> None:
    if path.exists() and (not path.is_dir() or not all(map(is_temporary, os.listdir(path)))):
        raise FileExistsError(f"vectors: folder must be new or empty, got {path}; name another")


def _write(recorder: "_Recorder", arguments: Arguments, path: Path) -> list[str]:
    """Run a program and write its nodes to a folder. Returns their names."""
    import numpy as np

    nodes: list[JsonObject] = []

    def write(node: Node, arrays: Arrays) -> None:
        file = f"{len(nodes):03}_{_short(arrays.about['operator'])}.npz"
        with whole_file(path / file) as opened:
            np.savez(opened, **arrays.arrays)
        nodes.append({"name": node.name, "file": file, **arrays.about, "arrays": arrays.described})

    recorder.write = write
    with torch.no_grad():
        for _ in recorder.steps(arguments):
            pass
    head: JsonObject = {
        "hop_vectors": FORMAT,
        "torch": torch.__version__,
        "inputs": [node.name for node in recorder.inputs],
        "outputs": [x.name for x, _ in recorder.outputs if isinstance(x, Node)],
    }
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
    lines.append('"nodes": [\n' + ",\n".join(json.dumps(n) for n in nodes) + "\n]")
    write_whole(path / "vectors.json", "{\n" + ",\n".join(lines) + "\n}\n")
    write_whole(path / "nodes.txt", "".join(f"{n['file']}\n" for n in nodes))
    for name in _EXTRA_FILES:
        write_whole(path / name, (files("hop.export.golden") / "files" / name).read_bytes())
    return [n["name"] for n in nodes]


def _short(operator: str) -> str:
    """The short name of an operator: conv2d for hop_scaled_buffers aten.conv2d.default."""
    *_, last = operator.split()
    parts = last.split(".")
    name = parts[1] if len(parts) > 1 else last.removeprefix("hop_").removesuffix("_buffers")
    return re.sub(r"\W", "_", name)


class _Recorder(Runner):
    """Runs a program and writes its nodes."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(program, "program", "vectors")
        self.write: Callable[[Node, Arrays], None]
        specs = zip(self.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True)
        self.inputs = [node for node, spec in specs if spec.kind is InputKind.USER_INPUT]
        depends = set(self.inputs)
        for node in self.graph.nodes:
            if any(x in depends for x in node.all_input_nodes):
                depends.add(node)
        self.written = {n for n in depends if n.op == "call_function" and _has_tensors(n)}

    def run(self, interpreter: fx.Interpreter, node: Node) -> object:
        args, kwargs = interpreter.fetch_args_kwargs_from_env(node) if node in self.written else ((), {})
        output = interpreter.run_node(node)
        if node in self.written:
            self.write(node, Arrays(node, args, kwargs, output))
        return output


def _has_tensors(node: Node) -> bool:
    """Whether a node computes tensors rather than passing them through."""
    name = getattr(node.target, "__name__", "")
    return name not in _PASS_THROUGH and any(isinstance(x, Tensor) for x in tree_leaves(value(node)))
