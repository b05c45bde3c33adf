"""Functions of single codes as TABLE, and softmax, in a .tosa file."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hop.export.targets.integer.steps import Step
from hop.export.targets.integer.values import common_order, tensor
from hop.export.targets.tosa.file import File
from hop.export.targets.tosa.scales import FORMATS, UNIT, Scale, clamped, plain, rescaled, result
from hop.numerics import fixed_point as fp
from hop.numerics.integer import lookup_tables
from hop.numerics.integer.functions import IntegerFunction, TfliteSoftmax, TfliteTable, TosaSoftmax
from hop.numerics.integer.softmax import exponentials, tables_of_16_bits
from hop.numerics.integer.tables import FUNCTIONS

_LONG = 512  # from this row length on, sums may need shifts beyond those of TOSA


def function(step: Step) -> None:
    """Any function of single codes, as a table of its convention's results: all 8-bit codes, or 513 16-bit points."""
    x, rule, file = step.arg(0), step.convention, step.file
    if not isinstance(rule, IntegerFunction) or not rule.takes(step.op, step.kwargs):
        raise NotImplementedError(f"its convention is {rule}; TOSA's TABLE needs one such as TfliteTable")
    order = common_order([x])
    index = tensor(file, x, order)
    if x.dtype == torch.int16:
        _interpolated(step, index, order)
        return
    every = torch.arange(-128, 128).to(torch.int8)
    units = torch.tensor(x.scale), x.zero, torch.tensor(step.result.scale), step.result.zero
    table = rule.codes(every, *units, FORMATS[step.result.dtype])  # type: ignore[attr-defined]
    name = step.result.name
    values = file.tensor(f"{name}_table", (256,), torch.int8, data=table)
    step.result.tensors[order] = file.operator("TABLE", [index, values], result(step, order))


def _interpolated(step: Step, index: str, order: Any) -> None:
    x, rule, file = step.arg(0), step.convention, step.file
    if not isinstance(rule, TfliteTable):
        raise NotImplementedError(
            f"its convention is {rule}; for 16 bits TABLE interpolates linearly, as TfliteTable does"
        )
    scale_in, out = torch.tensor(x.scale), torch.tensor(step.result.scale)
    entries = lookup_tables.table_513(FUNCTIONS[rule.function], scale_in, x.zero, out, step.result.zero)
    if int((entries[1:] - entries[:-1]).abs().max()) >= 2**15:
        raise NotImplementedError("its table changes by half of all codes in one step, which TABLE does not support")
    name = step.result.name
    values = file.tensor(f"{name}_table", (513,), torch.int16, data=entries)
    interpolated = file.made("TABLE", [index, values], f"{name}_fine", file.sizes[index])
    fine = Scale.number(torch.tensor(2.0**-7, dtype=torch.float64))  # TABLE returns seven fractional bits
    output = rescaled(file, interpolated, result(step, order), fine, (0, 0), 2**22)
    clamped(step, output, order)


def softmax(step: Step) -> None:
    """int8 softmax as in TensorFlow's legalization (TosaSoftmax), int16 softmax by the tables of TfliteSoftmax."""
    x, dim, rule = step.arg(0), step.arg(1), step.convention
    wide = x.dtype == torch.int16
    if not isinstance(rule, TfliteSoftmax if wide else TosaSoftmax):
        raise NotImplementedError(f"its convention is {rule}; supported are TosaSoftmax, and TfliteSoftmax for 16 bits")
    if dim % len(x.shape) != len(x.shape) - 1:
        raise NotImplementedError(f"softmax needs the last dimension, got {dim}; transpose before it")
    units = (2.0**-15, 0) if wide else (1 / 256, -128)
    if (step.result.scale, step.result.zero) != units:
        raise NotImplementedError(
            f"its codes have the scale 1/{1 / units[0]:.0f} and the zero point {units[1]}; quantize with these"
        )
    rows, order = _Rows(step.file, step.result.name, x.shape), x.plain
    below = rows.below(plain(step.file, tensor(step.file, x), x.zero))
    scale, beta = torch.tensor(x.scale), torch.tensor(rule.beta)
    if wide:
        shares = rows.wide_shares(below, scale * beta)
    else:
        wider = torch.tensor(rule.beta, dtype=torch.float64) * scale.to(torch.float64)
        shares = rows.shares(rows.exponentials(below, exponentials(wider)))
    output = rescaled(step.file, shares, result(step, order), UNIT, (0, units[1]), 2**16)
    clamped(step, output, order)


class _Rows:
    """int32 operators along the last dimension."""

    def __init__(self, file: File, name: str, shape: tuple[int, ...]) -> None:
        self.file, self.label, self.shape, self.one = file, name, tuple(shape), (*shape[:-1], 1)

    def below(self, x: str) -> str:
        """x minus the largest of its row."""
        last = len(self.shape) - 1
        most = self.file.made("REDUCE_MAX", [x], f"{self.label}_max", self.one, axis=last, nan_mode="PROPAGATE")
        return self.two("SUB", x, most)

    def exponentials(self, below: str, table: Tensor) -> str:
        """exp of 0 to -255 in fixed point without integer bits, assembled from four tables of bytes."""
        index = self.file.tensor(f"{self.label}_index", self.shape, torch.int16)
        by_128 = Scale.number(torch.tensor(128.0, dtype=torch.float64))
        index = rescaled(self.file, below, index, by_128, (0, 0), 255)
        entries = torch.cat([table.flip(0)[:1], table.flip(0), table[:1].expand(256)])  # -256 to 256; 0 is the largest
        parts = []
        for i, shift in enumerate((24, 16, 8, 0)):
            data = torch.div(entries, 2**shift, rounding_mode="floor").remainder(256)
            values = self.file.tensor(f"{self.label}_table{i}", (513,), torch.int16, data=data)
            part = self.file.made("TABLE", [index, values], f"{self.label}_byte{i}", self.shape)
            parts.append(self.left(part, shift - 7) if shift else self.right(part, 7))
        total = parts[0]
        for part in parts[1:]:
            total = self.two("ADD", total, part)
        return total

    def shares(self, exp: str) -> str:
        """exp divided by the sum of its row, in units of 1/256, by Newton's method."""
        half, zeros = self.normalized(self.right(exp, 12))
        y = self.two(
            "ADD", self.times(half, self.number(fp.MINUS_THIRTY_TWO_17THS), 31), self.number(fp.FORTY_EIGHT_17THS)
        )
        for _ in range(3):
            rest = self.two("SUB", self.number(2**29), self.times(y, half, 31))
            y = self.two("ADD", y, self.left(self.times(y, rest, 31), 2))
        by = self.two("SUB", self.number(35), zeros)
        product = self.times(exp, y, 30)
        if self.shape[-1] < _LONG:
            return self._shifted(product, by)
        # Shifting by more than 31 bits leaves 0.
        far = self.file.made("GREATER", [by, self.number(31)], f"{self.label}_far", self.one, torch.bool)
        by = self.file.made("MINIMUM", [by, self.number(31)], f"{self.label}_by", self.one, nan_mode="PROPAGATE")
        inputs = [far, self.number(0), self._shifted(product, by)]
        return self.file.made("SELECT", inputs, f"{self.label}_left", self.shape)

    def wide_shares(self, below: str, scale: Tensor) -> str:
        """Shares in units of 2^-15, from tables of exp and of 1 / (1 + x)."""
        exp_table, reciprocal_table = tables_of_16_bits(scale)
        # In units of 10/65535. For multipliers of 1/2 and more, both modes round once.
        by = Scale.number(scale.to(torch.float64) / (10.0 / 65535.0), "DOUBLE_ROUND")
        by = replace(by, rounding="SINGLE_ROUND") if by.right[0] <= 31 else by
        tenths = rescaled(
            self.file, below, self.file.tensor(f"{self.label}_tenths", self.shape, torch.int32), by, (0, 0), 2**16
        )
        exp = self.looked_up(self.two("ADD", tenths, self.number(32767)), exp_table)
        half, zeros = self.normalized(exp)
        place = self.two("SUB", self.right(half, 14), self.number(2**15 + 2**16))
        product = self.times(exp, self.looked_up(place, reciprocal_table, 2**17), 0)
        return self._shifted(product, self.two("SUB", self.number(31), zeros))

    def normalized(self, x: str) -> tuple[str, str]:
        """The sum of each row, shifted left up to the sign bit, and its number of leading zeros."""
        axis = len(self.shape) - 1
        total = self.file.made("REDUCE_SUM", [x], f"{self.label}_total", self.one, axis=axis)
        zeros = self.file.made("CLZ", [total], f"{self.label}_zeros", self.one)
        return self.two("LOGICAL_LEFT_SHIFT", total, self.two("SUB", zeros, self.number(1))), zeros

    def looked_up(self, x: str, table: Tensor, most: int = 2**31) -> str:
        """Linear interpolation in a table of 513 entries, at x clamped to 16 bits."""
        index = self.file.tensor(f"{self.label}_index", self.file.sizes[x], torch.int16)
        index = rescaled(self.file, x, index, UNIT, (0, 0), most)
        values = self.file.tensor(f"{self.label}_entries", (513,), torch.int16, data=table)
        return self.right(self.file.made("TABLE", [index, values], f"{self.label}_fine", self.file.sizes[index]), 7)

    def number(self, x: int) -> str:
        return self.file.constant([x], torch.int32, len(self.shape))

    def two(self, op: str, a: str, b: str) -> str:
        shape = max(self.file.sizes[a], self.file.sizes[b], key=lambda s: torch.Size(s).numel())
        return self.file.made(op, [a, b], f"{self.label}_{op.lower()}", shape)

    def times(self, a: str, b: str, shift: int) -> str:
        shape = max(self.file.sizes[a], self.file.sizes[b], key=lambda s: torch.Size(s).numel())
        return self.file.made("MUL", [a, b, self.file.constant([shift], torch.int8)], f"{self.label}_mul", shape)

    def left(self, x: str, bits: int) -> str:
        return self.two("LOGICAL_LEFT_SHIFT", x, self.number(bits))

    def right(self, x: str, bits: int) -> str:
        return self._shifted(x, self.number(bits))

    def _shifted(self, x: str, by: str) -> str:
        inputs, shape = [x, by], self.file.sizes[x]
        return self.file.made("ARITHMETIC_RIGHT_SHIFT", inputs, f"{self.label}_shift", shape, round=True)
