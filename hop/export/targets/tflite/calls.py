"""An operator of a .tflite file while it is converted to ours, and the codes that it reads and returns."""

from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.compat.pytree import Kwargs
from hop.dispatch.operators import aten
from hop.export.rewrite.code_floats import Held, run_quantize, run_requantized
from hop.export.rewrite.target import Target
from hop.export.targets.integer.graph import FileOperator, FileTensor
from hop.export.targets.tflite.tables import Function
from hop.numerics.formats import INT8, INT16
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import Convention
from hop.numerics.scale_rules import Static
from hop.numerics.tables import float32

FILE, SECOND = "file", "second"  # layouts: the file's, and channels second
TO = {SECOND: (0, 3, 1, 2), FILE: (0, 2, 3, 1)}
BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "NONE": (None, None),
    "RELU": (0.0, None),
    "RELU6": (0.0, 6.0),
    "RELU_N1_TO_1": (-1.0, 1.0),
}
_FORMATS = {"INT8": INT8, "INT16": INT16}
_PLAIN = {f.dtype: Quantizer(f, (-1,), Static(affine=f.bits == 8)) for f in _FORMATS.values()}


@dataclass
class Value:
    """Codes while the file is converted, by layout."""

    scale: float
    zero: int
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def at(self, layout: str = FILE) -> Tensor:
        """The codes in a layout."""
        if layout not in self.tensors:
            (have,) = self.tensors.values()
            self.tensors[layout] = aten.permute.default(have, list(TO[layout]))
        return self.tensors[layout]

    def held(self, layout: str = FILE) -> Held:
        """The codes as an argument of hop.scaled."""
        codes = self.at(layout)
        quantizer = _PLAIN[codes.dtype]
        return Held(quantizer, codes, [self.scale, self.zero][: 1 + quantizer.scale.has_zero_point()], torch.float32)


@dataclass(frozen=True)
class Known:
    """Facts read from a file before it is converted: names in the schema's enumerations, by number; integer constants,
    by tensor; and the functions that tables have, by operator.
    """

    names: dict[str, dict[int, str]]
    lists: dict[int, list[int]]
    functions: dict[int, Function]


@dataclass(frozen=True)
class Call:
    """An operator of the file while it is converted.

    inputs: the values of its inputs: a Value of codes, the constant tensor for other dtypes, or None.
    tensors: the file's description of each input.
    """

    op: FileOperator
    inputs: tuple[Value | Tensor | None, ...]
    tensors: tuple[FileTensor | None, ...]
    result: FileTensor
    target: Target
    known: Known

    def refuse(self, why: str) -> NoReturn:
        raise NotImplementedError(why)

    def value(self, i: int) -> Value:
        """An input of codes."""
        x = self.inputs[i] if i < len(self.inputs) else None
        if not isinstance(x, Value):
            self.refuse(f"its input {i} is not int8 or int16 codes")
        return x

    def numbers(self, i: int) -> list[int]:
        """A constant input of integers."""
        tensor = self.tensors[i] if i < len(self.tensors) else None
        if tensor is None or tensor.index not in self.known.lists:
            self.refuse(f"its input {i} is not an integer constant")
        return self.known.lists[tensor.index]

    def units(self) -> tuple[float, int]:
        """The scale and zero point of the result."""
        if self.result.kind not in _FORMATS or self.result.units is None:
            self.refuse(f"its result is {self.result.kind} {'' if self.result.units else 'without one scale'}".rstrip())
        if self.result.kind == "INT16" and self.result.units[1]:
            self.refuse(f"its result is INT16 with the zero point {self.result.units[1]}; it must be 0")
        return self.result.units

    def option(self, name: str, default: object = 0) -> Any:
        return self.op.option(name, default)

    def bounds(self) -> tuple[float | None, float | None]:
        """The range of the fused activation."""
        number = self.option("FusedActivationFunction")
        name = self.known.names["ActivationFunctionType"].get(number, str(number))
        if name not in BOUNDS:
            self.refuse(f"its fused activation {name} is not supported")
        return self.between_codes(BOUNDS[name])

    def between_codes(self, bounds: tuple[float | None, float | None]) -> tuple[float | None, float | None]:
        for bound in bounds:  # TFLite rounds ties away from zero, hop to even
            if bound and float32(bound / self.units()[0]) * 2 % 2 == 1:
                self.refuse(f"the bound {bound} of its activation is halfway between two codes")
        return bounds

    def convention(
        self, op: OpOverload, bounds: tuple[float | None, float | None], whole_weight: bool = False
    ) -> Convention:
        if (name := self.result.kind.lower()) not in self.target.dtypes:
            self.refuse(f"its result is {name}, but target {self.target.name} has {' and '.join(self.target.dtypes)}")
        row = self.target[op] if op in self.target else self.refuse(self.target.missing(str(op)))
        convention = row.per_tensor if whole_weight and row.per_tensor is not None else row.convention
        return replace(convention, low=bounds[0], high=bounds[1])

    def give(
        self,
        op: OpOverload,
        args: list[object],
        layout: str = FILE,
        bounds: tuple[float | None, float | None] | None = None,
        *,
        kwargs: Kwargs | None = None,
        convention: Convention | None = None,
    ) -> Value:
        """The result of hop.scaled."""
        scale, zero = self.units()
        rule = convention or self.convention(op, self.bounds() if bounds is None else bounds)
        format = _FORMATS[self.result.kind]
        output = Quantizer(format, (-1,), Static(affine=format.bits == 8, requantize=rule))
        given = [scale, zero][: 1 + output.scale.has_zero_point()]
        codes = run_requantized(op, output, args, kwargs or {}, given, None, [])
        return Value(scale, zero, {layout: codes})

    def check_same(self, x: Value) -> None:
        """Raise NotImplementedError unless the result has the scale and zero point of x."""
        if self.units() != (x.scale, x.zero):
            self.refuse(f"its result has the scale and zero point {self.units()}, its input {(x.scale, x.zero)}")

    def same(self, x: Value, codes: Tensor, layout: str = FILE) -> Value:
        """Rearranged codes of x."""
        self.check_same(x)
        return Value(x.scale, x.zero, {layout: codes})


def quantized(kind: str, x: Tensor, scale: float, zero: int, rule: Convention) -> Tensor:
    """The codes of floats."""
    plain = _PLAIN[_FORMATS[kind].dtype]
    quantizer = replace(plain, scale=replace(plain.scale, requantize=rule))
    return run_quantize(quantizer, x, [scale, zero][: 1 + plain.scale.has_zero_point()], None)


def layout_of(*values: Value) -> str:
    """The layout with channels second if all values have it, else the file's."""
    return SECOND if all(SECOND in v.tensors for v in values) else FILE
