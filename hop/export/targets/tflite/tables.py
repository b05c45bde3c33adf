"""Functions that TFLite has no integer operator for, as tables: CAST, ADD and GATHER of the codes of all codes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.compat.pytree import Args
from hop.dispatch.operators import FUNCTION, SCALED, aten
from hop.export.rewrite.code_floats import Held, run_requantized
from hop.export.targets.integer.graph import FileOperator, FileTensor
from hop.export.targets.integer.steps import ACTIVATIONS, Step
from hop.export.targets.integer.values import common_order, new, tensor
from hop.numerics.formats import INT8
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import Convention, Division
from hop.numerics.scale_rules import Static

LOOKUP = "GATHER of codes"  # the three operators as one: inputs are the codes and the table
_LOW, _HIGH = torch.iinfo(torch.int8).min, torch.iinfo(torch.int8).max
_UNITS = tuple[float, int]


@dataclass(frozen=True)
class Function:
    """A function of each element, and the range of its activation."""

    op: OpOverload
    args: Args = ()
    kwargs: tuple[tuple[str, object], ...] = ()
    bounds: tuple[float | None, float | None] = (None, None)

    def table(self, units: _UNITS, output_units: _UNITS, rule: Convention) -> Tensor:
        """The codes of the function of all int8 codes, in order."""
        plain = Quantizer(INT8, (-1,), Static(affine=True))
        every = Held(plain, torch.arange(_LOW, _HIGH + 1).to(torch.int8), list(units), torch.float32)
        output = Quantizer(INT8, (-1,), Static(affine=True, requantize=rule))
        return run_requantized(self.op, output, [every, *self.args], dict(self.kwargs), list(output_units), None, [])


def write_table(step: Step) -> None:
    """Look up each code, plus 128, in a table with the result's codes."""
    x, file, result, rule = step.arg(0), step.file, step.result, step.convention
    if x.dtype != torch.int8 or rule is None:
        raise NotImplementedError("functions of int16 are not supported; use int8 activations, or a function with one")
    function = Function(step.op, step.args[1:], tuple(step.kwargs.items()))
    codes = function.table((x.scale, x.zero), (result.scale, result.zero), rule)
    order = common_order([x])
    sizes = [x.shape[d] for d in order]
    units = ([result.scale], [result.zero], 0)
    table = file.tensor(f"{result.name}_table", codes.shape, torch.int8, units, codes)
    places = file.tensor(f"{result.name}_codes", sizes, torch.int32)
    types = file.schema.TensorType
    options = {"inDataType": types.INT8, "outDataType": types.INT32}
    places = file.operator("CAST", [tensor(file, x, order)], places, "CastOptions", options)
    indices = file.tensor(f"{result.name}_places", sizes, torch.int32)
    operands = [places, file.integers(f"{result.name}_lowest", [-_LOW])]
    none = {"fusedActivationFunction": file.activation("NONE")}
    indices = file.operator("ADD", operands, indices, "AddOptions", none)
    result.tensors[order] = file.operator(
        "GATHER", [table, indices], new(file, result, order), "GatherOptions", {"axis": 0}
    )


# ---- reading


def joined_lookups(
    operators: Sequence[FileOperator], tensors: Sequence[FileTensor], outputs: Sequence[int]
) -> tuple[FileOperator, ...]:
    """Replace each CAST, ADD and GATHER that look up int8 codes in a table by one LOOKUP."""
    by_result = {op.outputs[0]: op for op in operators if len(op.outputs) == 1}
    readers = [i for op in operators for i in op.inputs] + list(outputs)
    result: dict[int, FileOperator] = {op.index: op for op in operators}
    for op in operators:
        parts = _parts_of_lookup(op, by_result, tensors)
        if parts is None:
            continue
        cast, add = parts
        result[op.index] = replace(op, name=LOOKUP, inputs=(cast.inputs[0], op.inputs[0]))
        dropped = op.inputs[1]
        for part in (add, cast):
            readers.remove(dropped)
            if dropped in readers:
                break  # something else reads it, too
            del result[part.index]
            dropped = part.inputs[0]
    return tuple(result.values())


def _parts_of_lookup(
    op: FileOperator, by_result: dict[int, FileOperator], tensors: Sequence[FileTensor]
) -> tuple[FileOperator, FileOperator] | None:
    """The CAST and ADD of which a GATHER reads the result; None if it looks up something else."""
    if op.name != "GATHER" or len(op.inputs) != 2 or None in op.inputs:
        return None
    table = tensors[op.inputs[0]]  # type: ignore[index]
    add = by_result.get(op.inputs[1])  # type: ignore[arg-type]
    if table.data is None or table.kind != "INT8" or table.shape != (_HIGH + 1 - _LOW,):
        return None
    if add is None or add.name != "ADD" or len(add.inputs) != 2 or None in add.inputs:
        return None
    cast, constant = by_result.get(add.inputs[0]), tensors[add.inputs[1]].data  # type: ignore[arg-type,index]
    is_lowest = constant is not None and constant.reshape(-1).tolist() == [-_LOW]
    if not is_lowest or add.option("FusedActivationFunction", 0) or op.option("Axis", 0) or op.option("BatchDims", 0):
        return None
    if cast is None or cast.name != "CAST" or len(cast.inputs) != 1 or cast.inputs[0] is None:
        return None
    kinds = tensors[cast.inputs[0]].kind, tensors[cast.outputs[0]].kind
    return (cast, add) if kinds == ("INT8", "INT32") else None


def function_of_table(table: Tensor, units: _UNITS, output_units: _UNITS) -> Function | None:
    """The function that has this table by Division; None if there is none."""
    for function in _functions(table, units, output_units):
        for bounds in ACTIVATIONS:
            rule = Division(low=bounds[0], high=bounds[1])
            if torch.equal(function.table(units, output_units, rule), table):
                return replace(function, bounds=bounds)
    return None


def _functions(table: Tensor, units: _UNITS, output_units: _UNITS) -> Iterator[Function]:
    for op, row in SCALED.items():
        if row.family is FUNCTION and op is not aten.leaky_relu.default:
            yield Function(op)
    yield Function(aten.gelu.default, kwargs=(("approximate", "tanh"),))
    yield from (Function(aten.leaky_relu.default, (slope,)) for slope in _slopes(table, units, output_units))


def _slopes(table: Tensor, units: _UNITS, output_units: _UNITS) -> Iterator[float]:
    """Slopes of leaky relu whose results below 0 round to the table's codes, where these are not at an end."""
    x = torch.arange(_LOW - units[1], 0).to(torch.float64) * units[0]
    y = table[: len(x)].to(torch.float64) - output_units[1]
    inside = (table[: len(x)] > _LOW) & (table[: len(x)] < _HIGH)
    if not bool(inside.any()):
        return
    x, y = x[inside], y[inside]
    low = ((y + 0.5) * output_units[0] / x).amax().item()
    high = ((y - 0.5) * output_units[0] / x).amin().item()
    middle = (low + high) / 2
    yield from (round(middle, digits) for digits in range(1, 9))
    yield middle
