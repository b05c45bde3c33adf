"""Programs of integers as ONNX files of onnxruntime's operators of integers."""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch.export import ExportedProgram

from hop.dispatch.operators import Family
from hop.export.rewrite.program import check_program
from hop.export.targets.models import Model
from hop.export.targets.onnx.operators import BYTES
from hop.export.targets.qoperator.file import File
from hop.export.targets.qoperator.operators import WRITTEN
from hop.export.targets.qoperator.views import padded
from hop.export.targets.tflite.model import Writer
from hop.export.targets.tflite.steps import Step
from hop.numerics.formats import INT8, UINT8


class QOperatorModel(Model):
    """An ONNX file of codes.

    Args:
        buffer: its bytes.
        tensors: for each node of the program that holds codes, the name of the file's tensor and which dimension of the
            node's each of its dimensions is.
    """


def to_qoperator(program: ExportedProgram, *, weights: torch.dtype = torch.uint8) -> QOperatorModel:
    """A program that `to_integer(program, target=hop.export.targets.ONNX_INTEGER)` gave as an ONNX file of
    onnxruntime's operators of integers, which give the same codes: its format QOperator.

    Inputs and outputs of the file are the codes of those of the program; scales and zero points of tensors stand in
    its quantization annotations. Sizes are static.

    Args:
        program: of activations of uint8 or int8, and weights of int8.
        weights: as which dtype the codes of weights are written beside activations of uint8: as torch.uint8, 128 more,
            which onnxruntime multiplies exactly on every CPU; or as torch.int8, which it does faster, but on x86 CPUs
            without VNNI wrongly where two products leave 16 bits. Beside activations of int8 it has int8 alone.

    Raises:
        ImportError: onnx is not installed.
        TypeError: `program` is no ExportedProgram.
        ValueError: `weights` is another dtype.
        NotImplementedError: a node is no operator on codes of int8 or uint8, or one that onnxruntime has no operator
            for, or its convention is not onnxruntime's. It is named.
    """
    check_program(program, "to_qoperator")
    if weights not in BYTES:
        raise ValueError(f"to_qoperator: weights must be torch.uint8 or torch.int8, got {weights!r}; take one of them")
    return _Writer(program, File(weights)).written()


class _Writer(Writer):
    caller, runtime, model = "to_qoperator", "onnxruntime", QOperatorModel
    formats = (INT8, UINT8)
    written_families: ClassVar[Mapping[Family, Callable[[Step], None]]] = WRITTEN
    padded = staticmethod(padded)
