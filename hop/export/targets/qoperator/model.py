"""to_qoperator."""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch.export import ExportedProgram

from hop.dispatch.operators import Family
from hop.export.rewrite.program import check_program
from hop.export.targets.integer.model import Model
from hop.export.targets.integer.steps import Step
from hop.export.targets.integer.writer import Writer
from hop.export.targets.onnx.operators import BYTES
from hop.export.targets.qoperator.file import File
from hop.export.targets.qoperator.operators import WRITTEN
from hop.export.targets.qoperator.views import padded
from hop.numerics.formats import INT8, UINT8


class QOperatorModel(Model):
    """An ONNX file of codes.

    Args:
        buffer: its bytes.
        tensors: for each node of the program with codes, the name of the file's tensor, and which of the node's
            dimensions each of its dimensions is.
    """


def to_qoperator(program: ExportedProgram, *, weights: torch.dtype = torch.uint8) -> QOperatorModel:
    """Convert a program to an ONNX file with onnxruntime's integer operators (format QOperator), which return the same
    codes.

    The file's inputs and outputs are the codes of the program's; scales and zero points of tensors are in its
    quantization annotations. Sizes are static.

    Args:
        program: from `to_integer(program, target=hop.export.targets.ONNX_INTEGER)`, with uint8 or int8 activations and
            int8 weights.
        weights: the dtype of the codes of weights that are multiplied with uint8 activations. torch.uint8, shifted by
            128, is exact in onnxruntime on every CPU. torch.int8 is faster, but wrong on x86 CPUs without VNNI if two
            products exceed 16 bits. With int8 activations, onnxruntime only supports int8.

    Raises:
        ImportError: onnx is not installed.
        TypeError: `program` is not an ExportedProgram.
        ValueError: `weights` is another dtype.
        NotImplementedError: a node is not an operator on int8 or uint8 codes, has no counterpart in onnxruntime, or has
            another convention; the message names it.
    """
    check_program(program, "to_qoperator")
    if weights not in BYTES:
        raise ValueError(f"to_qoperator: weights must be torch.uint8 or torch.int8, got {weights!r}; take one of them")
    return _Writer(program, File(weights)).written()


class _Writer(Writer):
    caller, runtime, model = "to_qoperator", "onnxruntime", QOperatorModel
    formats = (INT8, UINT8)
    converters: ClassVar[Mapping[Family, Callable[[Step], None]]] = WRITTEN
    padded = staticmethod(padded)
