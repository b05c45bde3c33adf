"""verify: compare a program with another program, or with a file that another runtime runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from torch.export import ExportedProgram
from torch.fx import GraphModule

from hop.export.analysis.arguments import Data, parse
from hop.export.analysis.comparison import Comparison, compare_programs
from hop.export.rewrite.program import check_program
from hop.export.rewrite.pt2e import PT2E
from hop.export.targets.executorch.runner import ExecuTorch
from hop.export.targets.integer.comparing import Runtime, run_comparison
from hop.export.targets.integer.model import Model, content
from hop.export.targets.onnx.arithmetic import ONNX_INTEGER, ONNX_QDQ
from hop.export.targets.onnx.runner import OnnxRuntime
from hop.export.targets.qoperator.model import QOperatorModel
from hop.export.targets.tflite.arithmetic import TFLITE, TFLITE_16X8, TFLITE_MICRO, TFLITE_MICRO_16X8
from hop.export.targets.tflite.model import TfliteModel
from hop.export.targets.tflite.runner import LiteRT, Micro
from hop.export.targets.tosa.arithmetic import TOSA_1_0, TOSA_1_0_INT16
from hop.export.targets.tosa.model import TosaModel
from hop.export.targets.tosa.runner import TosaRuntime
from hop.numerics.spelling import shown

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager
    from torch.onnx import ONNXProgram

Program: TypeAlias = ExportedProgram | GraphModule
File: TypeAlias = "Model | ExecutorchProgramManager | ONNXProgram | bytes | str | Path"
_CALLER = "verify"
TARGETS = (
    *(TFLITE, TFLITE_16X8, TFLITE_MICRO, TFLITE_MICRO_16X8, TOSA_1_0, TOSA_1_0_INT16, PT2E, ONNX_QDQ, ONNX_INTEGER),
)
_KINDS: dict[str, type[Model]] = {".tflite": TfliteModel, ".tosa": TosaModel, ".onnx": QOperatorModel}
_IDENTIFIERS = {b"TFL3": ".tflite", b"TOSA": ".tosa", b"ET12": ".pte"}  # bytes 4 to 7 of a file; ONNX has none
_SUFFIXES = (*_KINDS, ".pte")


@overload
def verify(program: Program, model: Program, inputs: Data) -> Comparison: ...


@overload
def verify(program: ExportedProgram, model: File, inputs: Data, *, kernels: str = "reference") -> Comparison: ...


def verify(program: Any, model: Any, inputs: Data, *, kernels: str = "reference") -> Comparison:
    """Run a program and another program, or a file, on the same inputs and compare corresponding nodes.

    Programs run without gradients and are not changed, nor are the buffers that they write to: each input starts from
    their current values.

    LiteRT or TensorFlow Lite Micro runs a .tflite file, TOSA's reference model a .tosa file, onnxruntime an ONNX file,
    and ExecuTorch a .pte file, of which only outputs are compared. The file gets the codes that the program computes
    from its inputs, or the inputs themselves if it expects floats. For the first node that differs, it is determined
    which convention of hop.requantization and hop.integer_functions reproduces the runtime's codes. TOSA's reference
    model is a separate program. The environment variable HOP_TOSA names it, its
    folder, or the Python environment that has it; its package, tosa-tools, pins other versions than ours.

    Args:
        program: an exported program, or its module (`program.module()`) to compare with another program. To compare
            with a file, pass a program from `to_integer(program, target=...)` for the file's runtime, or one with
            quantize and dequantize nodes.
        model: another program or its module; or what to_tflite, to_tosa, to_qoperator, to_onnx or to_executorch
            returned, the path of such a file, or its bytes. All but TOSA's reference model run it in this process, so
            pass only files that you trust.
        inputs: a tuple of the program's positional arguments, a dict of its arguments by name, or a list of such tuples
            or dicts, over which differences are accumulated.
        kernels: for a .tflite file, "reference"; "optimized" for LiteRT's CPU kernels, without delegates; or "micro"
            for those of TensorFlow Lite Micro.

    Returns:
        A Comparison. str() formats a table of outputs and differences.

    Raises:
        ImportError: the runtime of the file is not installed.
        TypeError: an argument has the wrong type.
        OSError: the file does not exist.
        ValueError: the file is damaged, or its runtime rejects it; there are no inputs, or they do not fit; or the two
            differ in the number or shapes of inputs or outputs.
        NotImplementedError: the file has several subgraphs or methods, or dynamic sizes.
        RuntimeError: TOSA's reference model or ExecuTorch failed; the message has its output.
    """
    if isinstance(model, ExportedProgram | GraphModule):
        _check_no_kernels("a program", kernels)
        return compare_programs(program, model, inputs)
    check_program(program, _CALLER)
    file = _as_file(model)
    given = parse(_CALLER, "inputs", inputs)
    return run_comparison(program, _runtime(file, kernels), _CALLER, given, TARGETS)


def _as_file(model: Any) -> Model | bytes | str | Path:
    """A model as the file or bytes of one; raises TypeError for anything else."""
    if isinstance(model, Model | bytes | str | Path):
        return model
    # The classes of these exist only once their modules are imported, which takes seconds.
    if (exir := sys.modules.get("executorch.exir")) and isinstance(model, exir.ExecutorchProgramManager):
        return model.buffer
    if (onnx := sys.modules.get("torch.onnx")) and isinstance(model, onnx.ONNXProgram):
        return model.model_proto.SerializeToString()
    raise TypeError(
        f"{_CALLER}: model must be an exported program or its module(), or what to_tflite, to_tosa, to_qoperator, "
        f"to_onnx or to_executorch returned, the path of such a file, or its bytes, got {shown(model)}; make a program "
        "with torch.export.export, or a file with hop.export.to_tflite"
    )


def _runtime(model: Model | bytes | str | Path, kernels: str) -> Runtime:
    kind = file_kind(model)
    if kind is None:
        raise ValueError(
            f"{_CALLER}: model must be a .tflite, .tosa, .pte or ONNX file, got {shown(model)}; "
            "give an ONNX file the suffix .onnx, or pass its bytes"
        )
    if kind == ".tflite":
        return Micro(_CALLER, model) if kernels == "micro" else LiteRT(_CALLER, model, kernels)
    _check_no_kernels(f"a {kind} file", kernels)
    if kind == ".tosa":
        return TosaRuntime(_CALLER, *content(_CALLER, model, TosaModel, "a .tosa file"))
    if kind == ".pte":
        return ExecuTorch(_CALLER, *content(_CALLER, model, Model, "a .pte file"))
    return OnnxRuntime(_CALLER, *content(_CALLER, model, QOperatorModel, "an ONNX file"))


def _check_no_kernels(what: str, kernels: str) -> None:
    if kernels != "reference":
        raise ValueError(f"{_CALLER}: kernels must be 'reference' for {what}, got {shown(kernels)}; omit it")


def file_kind(model: Model | bytes | str | Path) -> str | None:
    """A file's kind, ".tflite", ".tosa", ".pte" or ".onnx", from its class, its identifying bytes, or its suffix.

    Bytes without an identifier are ".onnx"; None for a path of another kind.
    """
    if isinstance(model, Model):
        return next((end for end, kind in _KINDS.items() if isinstance(model, kind)), None)
    if isinstance(model, bytes):
        return _IDENTIFIERS.get(model[4:8], ".onnx")
    with Path(model).open("rb") as file:
        identifier = file.read(8)[4:]
    suffix = Path(model).suffix
    return _IDENTIFIERS.get(identifier) or (suffix if suffix in _SUFFIXES else None)
