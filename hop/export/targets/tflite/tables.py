"""Functions that TFLite has no integer operator for, as tables: CAST, ADD and GATHER of the codes of all codes."""

import torch

from hop.export.rewrite.code_floats import Held, run_requantized
from hop.export.targets.integer.steps import Step
from hop.export.targets.integer.values import common_order, new, tensor
from hop.numerics.formats import INT8
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Static


def write_table(step: Step) -> None:
    """Look up each code, plus 128, in a table with the result's codes."""
    x, file, result, rule = step.arg(0), step.file, step.result, step.convention
    if x.dtype != torch.int8 or rule is None:
        raise NotImplementedError("functions of int16 are not supported; use int8 activations, or a function with one")
    low, high = torch.iinfo(torch.int8).min, torch.iinfo(torch.int8).max
    every = Held(
        Quantizer(INT8, (-1,), Static(affine=True)), torch.arange(low, high + 1).to(torch.int8), [], torch.float32
    )
    output = Quantizer(INT8, (-1,), Static(affine=True, requantize=rule))
    given, operand = [result.scale, result.zero], every._replace(given=[x.scale, x.zero])
    codes = run_requantized(step.op, output, [operand, *step.args[1:]], step.kwargs, given, None, [])
    order = common_order([x])
    sizes = [x.shape[d] for d in order]
    units = ([result.scale], [result.zero], 0)
    table = file.tensor(f"{result.name}_table", codes.shape, torch.int8, units, codes)
    places = file.tensor(f"{result.name}_codes", sizes, torch.int32)
    types = file.schema.TensorType
    options = {"inDataType": types.INT8, "outDataType": types.INT32}
    places = file.operator("CAST", [tensor(file, x, order)], places, "CastOptions", options)
    indices = file.tensor(f"{result.name}_places", sizes, torch.int32)
    operands = [places, file.integers(f"{result.name}_lowest", [-low])]
    none = {"fusedActivationFunction": file.activation("NONE")}
    indices = file.operator("ADD", operands, indices, "AddOptions", none)
    result.tensors[order] = file.operator(
        "GATHER", [table, indices], new(file, result, order), "GatherOptions", {"axis": 0}
    )
