"""hop.export.verify: a program beside another one, or beside the file of another runtime."""

from pathlib import Path
from typing import Any, TypeAlias, overload

from torch.export import ExportedProgram
from torch.fx import GraphModule

from hop.export.analysis.arguments import Data, parse
from hop.export.analysis.verify import Comparison, compare_programs
from hop.export.golden.beside import FileComparison, Runtime, compared
from hop.export.golden.litert import LiteRT
from hop.export.golden.micro import Micro
from hop.export.golden.qoperator import OnnxRuntime
from hop.export.golden.tosa import TosaRuntime
from hop.export.rewrite.program import check_program
from hop.export.targets.models import Model
from hop.export.targets.qoperator.model import QOperatorModel
from hop.export.targets.tflite.model import TfliteModel
from hop.export.targets.tosa.model import TosaModel
from hop.numerics.spelling import shown

Program: TypeAlias = ExportedProgram | GraphModule
File: TypeAlias = Model | bytes | str | Path
_CALLER = "verify"
_KINDS: dict[str, type[Model]] = {".tflite": TfliteModel, ".tosa": TosaModel, ".onnx": QOperatorModel}
_IDENTIFIERS = {b"TFL3": ".tflite", b"TOSA": ".tosa"}  # bytes 4 to 7 of a file; ONNX has none


@overload
def verify(program: Program, model: Program, inputs: Data) -> Comparison: ...


@overload
def verify(program: ExportedProgram, model: File, inputs: Data, *, kernels: str = "reference") -> FileComparison: ...


def verify(program: Any, model: Any, inputs: Data, *, kernels: str = "reference") -> Comparison:
    """Run a program and another program or a file on the same inputs and compare what corresponds, node by node.

    Two programs: neither is changed, nor the buffers that it writes to; each input finds them as they are now. Without
    gradients.

    A file: LiteRT runs a .tflite file, TOSA's reference model a .tosa file, onnxruntime an ONNX file. The file gets
    the codes that the program makes of its inputs, or the inputs themselves where it takes floats. For the first node
    that differs, verify tries which convention of hop.requantization and hop.integer_functions gives the runtime's
    codes. The environment variable HOP_TOSA names the reference model, its folder or the Python environment that has
    it: the versions that its package, tosa-tools, pins are not those of hop.

    Args:
        program: an exported program; beside another program its module (`program.module()`) will do. Beside a file it
            is one of `to_integer(program, target=...)` with the target of that runtime, or of quantize and dequantize
            nodes.
        model: another program or its module; or a TfliteModel, a TosaModel or a QOperatorModel, the path of such a
            file, or its bytes. LiteRT and onnxruntime run it in this process: only for files that you trust.
        inputs: the tuple of the program's positional arguments, a dict of its arguments by name, or a list of such
            tuples or dicts, over which figures are summed.
        kernels: of a .tflite file: "reference"; "optimized", those of LiteRT for CPUs, without delegates; or "micro",
            those of TensorFlow Lite Micro.

    Returns:
        A Comparison, of a file a FileComparison. `str()` of it is a table of outputs and of what differs.

    Raises:
        ImportError: the runtime of the file is not installed.
        TypeError: an argument is none of these.
        OSError: there is no such file.
        ValueError: a damaged file, or one that its runtime does not take; inputs that do not fit a program, or none; or
            different numbers or shapes of inputs or outputs.
        NotImplementedError: the file has several subgraphs, or dynamic sizes.
        RuntimeError: the reference model stopped, with what it said.
    """
    if isinstance(model, ExportedProgram | GraphModule):
        _check_no_kernels("a program", kernels)
        return compare_programs(program, model, inputs)
    check_program(program, _CALLER)
    if not isinstance(model, Model | bytes | str | Path):
        raise TypeError(
            f"{_CALLER}: model must be an exported program or its module(), or a TfliteModel, TosaModel or "
            f"QOperatorModel, the path of such a file, or its bytes, got {shown(model)}; make a program with "
            "torch.export.export, or a file with hop.export.to_tflite, to_tosa or to_qoperator"
        )
    given = parse(_CALLER, "inputs", inputs)
    return compared(program, _runtime(model, kernels), _CALLER, given)


def _runtime(model: File, kernels: str) -> Runtime:
    kind = file_kind(model)
    if kind is None:
        raise ValueError(
            f"{_CALLER}: model must be a .tflite, .tosa or ONNX file, got {shown(model)}; "
            "name a file of ONNX with .onnx at its end, or read it into a QOperatorModel"
        )
    if kind == ".tflite":
        return Micro(_CALLER, model) if kernels == "micro" else LiteRT(_CALLER, model, kernels)
    _check_no_kernels(f"a {kind} file", kernels)
    return TosaRuntime(_CALLER, model) if kind == ".tosa" else OnnxRuntime(_CALLER, model)


def _check_no_kernels(what: str, kernels: str) -> None:
    if kernels != "reference":
        raise ValueError(f"{_CALLER}: kernels must be 'reference' for {what}, got {shown(kernels)}; leave it out")


def file_kind(model: File) -> str | None:
    """Tell a ".tflite", ".tosa" or ".onnx" file by its class, its identifier, or the end of its name.

    Bytes without an identifier are ".onnx"; None for a path of another kind.
    """
    if isinstance(model, Model):
        return next((end for end, kind in _KINDS.items() if isinstance(model, kind)), None)
    if isinstance(model, bytes):
        return _IDENTIFIERS.get(model[4:8], ".onnx")
    with Path(model).open("rb") as file:
        identifier = file.read(8)[4:]
    suffix = Path(model).suffix
    return _IDENTIFIERS.get(identifier) or (suffix if suffix in _KINDS else None)
