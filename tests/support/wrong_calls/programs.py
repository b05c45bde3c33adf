"""Wrong calls of hop.export, hop.report and the command line."""

import contextlib
import functools
import io

import torch
from torch import nn

from hop import export, presets, report, schemes
from hop.cli import main
from tests.support.wrong_calls.row import each, floats, mm, wrong

PROGRAM = "must be a torch.export.ExportedProgram"
EXPORT = "make one with torch.export.export"


@functools.cache
def program():
    return torch.export.export(nn.Linear(8, 4), (floats(2, 8),))


class CommandError(Exception):
    """The error message of the command line."""


def command(*words: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = main(list(words))
    if status:
        raise CommandError(said.getvalue())


PROGRAMS = [
    *each(wrong, TypeError, f"program | {PROGRAM} | {EXPORT}", {
        "check_text": ("'x'", lambda: export.check("x", operators=[mm])),
        "lower_module": ("Linear(in_features=2", lambda: export.lower(nn.Linear(2, 2))),
        "follow_dtype_none": ("None", lambda: export.follow_dtype(None)),
        "from_torch_number": ("3", lambda: export.from_torch(3)),
        "to_torch_text": ("'x'", lambda: export.to_torch("x")),
        "to_integer_text": ("'x'", lambda: export.to_integer("x")),
        "to_onnx_text": ("'x'", lambda: export.to_onnx("x")),
        "to_tosa_text": ("'x'", lambda: export.to_tosa("x")),
        "to_qdq_text": ("'x'", lambda: export.to_qdq("x")),
        "to_executorch_text": ("'x'", lambda: export.to_executorch("x")),
        "to_scheme_text": ("'x'", lambda: export.to_scheme("x", schemes.INT8_DYNAMIC)),
    }),
    wrong("to_scheme_scheme", TypeError, lambda: export.to_scheme(program(), "x"),
          "scheme | 'x' | must be a hop.Scheme | give one such as hop.schemes.INT8_DYNAMIC"),
    wrong("to_scheme_static", ValueError, lambda: export.to_scheme(program(), schemes.INT8_STATIC),
          "lhs | Static(affine=True) | has a static scale | use a dynamic one"),
    wrong("check_nothing", ValueError, lambda: export.check(program()),
          "operators | None | allows everything | give one of them"),
    wrong("check_operators_text", TypeError, lambda: export.check(program(), operators="mm"),
          "operators | 'mm' | must be a list, a tuple or a set | give a list of one"),
    wrong("check_operators_number", TypeError, lambda: export.check(program(), operators=[3]),
          "operators | 3 | must be operators of torch.ops | give one such as torch.ops.aten.mm.default"),
    wrong("check_dtypes_text", TypeError, lambda: export.check(program(), dtypes=["float32"]),
          "dtypes | 'float32' | must be of torch.dtype | give one such as torch.float32"),
    wrong("ranges_name", ValueError, lambda: export.ranges(program(), {"y": (0, 1)}),
          "inputs | 'y' | must name inputs of the program | take one of input"),
    wrong("ranges_list", TypeError, lambda: export.ranges(program(), [(0, 1)]),
          "inputs | [(0, 1)] | must be a mapping from names to pairs | give one such as {'input': (0, 1)}"),
    wrong("ranges_pair", ValueError, lambda: export.ranges(program(), {"input": (1, 0)}),
          "inputs['input'] | (1, 0) | must be a pair of ascending numbers | give one such as (0, 1)"),
    wrong("to_integer_requantize", TypeError, lambda: export.to_integer(program(), requantize="tflite"),
          "requantize | 'tflite' | must be a convention of hop.requantization | "
          "give one such as hop.requantization.TFLITE"),
    wrong("to_onnx_weights", ValueError, lambda: export.to_onnx(program(), weights=torch.float32),
          "weights | torch.float32 | must be None, torch.uint8 or torch.int8 | take one of them"),
    wrong("to_qdq_target", ValueError, lambda: export.to_qdq(program(), target="qnn"),
          "target | 'qnn' | must be \"xnnpack\" or None | take one of them"),
    wrong("verify_program", TypeError, lambda: export.verify("x", program(), (floats(2, 8),)),
          f"program | 'x' | {PROGRAM} | {EXPORT}"),
    wrong("verify_second", TypeError, lambda: export.verify(program(), 3, (floats(2, 8),)),
          "model | 3 | must be an exported program or its module() | make a program with torch.export.export"),
    *each(wrong, TypeError,
          "inputs | must be the tuple of a program's positional arguments | give (x,) for one tensor", {
        "verify_tensor": ("(2, 8)", lambda: export.verify(program(), program(), floats(2, 8))),
        "verify_none": ("None", lambda: export.verify(program(), program(), None)),
    }),
    wrong("verify_empty", ValueError, lambda: export.verify(program(), program(), []),
          "inputs | [] | must hold one tuple or dict of arguments or more | give (x,) for one tensor"),
    wrong("verify_few", ValueError, lambda: export.verify(program(), program(), ()),
          "inputs | have 0 | takes 1 tensors or numbers | give as many"),
    wrong("verify_name", ValueError, lambda: export.verify(program(), program(), {"y": floats(2, 8)}),
          "inputs | y= | takes the arguments input | give a dict of all by name"),
    *each(wrong, TypeError, f"model | {PROGRAM} | {EXPORT}", {
        "report_model": ("'x'", lambda: report.compare("x", data=(floats(2, 8),))),
        "sweep_model": ("'x'", lambda: report.sweep("x")),
    }),
    wrong("report_reference", TypeError, lambda: report.compare(program(), "x", (floats(2, 8),)),
          f"reference | 'x' | {PROGRAM} | {EXPORT}"),
    wrong("report_no_data", ValueError, lambda: report.compare(nn.Linear(8, 4)),
          "data | None | no program keeps its arguments | pass some"),
    wrong("report_data", TypeError, lambda: report.compare(nn.Linear(8, 4), data=floats(2, 8)),
          "data | (2, 8) | must be the tuple of a program's positional arguments | give (x,) for one tensor"),
    *each(wrong, ValueError, "runs | must be an integer of at least 1 | give one such as 3", {
        "report_runs": ("0", lambda: report.compare(program(), runs=0)),
        "report_runs_text": ("'x'", lambda: report.compare(program(), runs="x")),
    }),
    wrong("report_progress", TypeError, lambda: report.compare(program(), progress=3),
          "progress | 3 | must be a function | leave it out"),
    wrong("sweep_candidates", TypeError, lambda: report.sweep(program(), candidates=[1]),
          "candidates | [1] | must be a dict of schemes by name | give one such as hop.report.CANDIDATES"),
    wrong("sweep_candidate", TypeError, lambda: report.sweep(program(), candidates={"a": presets.INT8_ROW}),
          "candidates['a'] | Quantizer(format=int8 | must be a hop.Scheme | give one such as hop.schemes.INT8_DYNAMIC"),
    wrong("sweep_loss", TypeError, lambda: report.sweep(program(), candidates={}, loss=3),
          "loss | 3 | must be a function | leave it out"),
    wrong("sweep_options", TypeError, lambda: report.sweep(program(), options={"rounds": 1}),
          "options | {'rounds': 1} | must be hop.report.Options | give one such as hop.report.Options(rounds=5)"),
    wrong("sweep_rounds", ValueError, lambda: report.Options(rounds=0),
          "rounds | 0 | must be an integer of at least 1 | give one such as 5"),
]  # fmt: skip

COMMANDS = [
    wrong("command_operator", CommandError, lambda: command("explain", "mm", "int32", "int8:2x2"),
          "OP | 'mm' | is not an operator | spell it as aten.linear.default"),
    wrong("command_overload", CommandError, lambda: command("explain", "aten.add.Foo", "int32", "int8:2x2"),
          "OP | aten.add.Foo | torch.ops has no operator | take one of Tensor"),
    wrong("command_output", CommandError, lambda: command("explain", "aten.mm", "int33", "int8:2x2", "int8:2x2"),
          "OUTPUT | 'int33' | is neither a dtype of torch | run hop formats --presets"),
    wrong("command_preset", CommandError, lambda: command("explain", "aten.mm", "int32", "int8:2x2", "INT8_RW:2x2"),
          "ARG | 'INT8_RW' | nor a preset | run hop formats --presets"),
    wrong("command_argument", CommandError, lambda: command("explain", "aten.mm", "int32", "foo"),
          "ARG | 'foo' | is not an argument | spell tensors as int8:128x256"),
    wrong("command_number", CommandError, lambda: command("explain", "aten.mm", "int32", "3", "int8:2x2"),
          "self | 3 | must be a tensor | make one with torch.tensor"),
    wrong("command_modifier", CommandError, lambda: command("explain", "aten.mm", "int32", "int8:2x2.tt", "int8:2x2"),
          "ARG | 'tt' | must be one of t, pack, channels_last | take one of them"),
    wrong("command_order", CommandError, lambda: command("explain", "aten.mm", "int32", "mat2=int8:2x2", "int8:2x2"),
          "ARG | 'int8:2x2' | follows a named argument | put it before"),
    wrong("command_shapes", CommandError, lambda: command("explain", "aten.mm", "int32", "int8:2x3", "int8:2x3"),
          "mat2 | (2, 3) | which must be equal | transpose or reshape one of them"),
    wrong("command_device", CommandError, lambda: command("explain", "aten.mm", "int32", "int8:2x2", "int8:2x2",
          "--device", "gpu"),
          "--device | 'gpu' | is not a device of PyTorch | use one such as cpu"),
    wrong("command_format", CommandError, lambda: command("formats", "int99"),
          "NAME | 'int99' | is not a format | use one of int8"),
    wrong("command_kernel", CommandError, lambda: command("kernels", "build", "zzz"),
          "kernel | 'zzz' | no kernel is named | run hop kernels list"),
]  # fmt: skip
