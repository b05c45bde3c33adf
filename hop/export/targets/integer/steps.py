"""A call of the program while it is converted: its arguments, its result, and how to add its operator to the file."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hop.compat.pytree import Args, Kwargs
from hop.export.targets.integer.values import Codes, Order, new
from hop.numerics.requantization import Convention

ACTIVATIONS = {(None, None): "NONE", (0.0, None): "RELU", (0.0, 6.0): "RELU6", (-1.0, 1.0): "RELU_N1_TO_1"}


@dataclass(frozen=True)
class Weight:
    """Constant codes of a product, with zero point 0."""

    name: str
    codes: Tensor
    scales: Tensor  # float32, one per tensor or one per output channel


@dataclass(frozen=True)
class Index:
    """Integer indices, an input of the file."""

    tensor: Any


@dataclass(frozen=True)
class Step:
    """A call of the program: its operator, its arguments (Codes, Weight, tensors, numbers) and its result's codes."""

    file: Any  # a File of this or another format
    op: Any
    args: Args
    kwargs: Kwargs
    result: Codes
    low: float | None = None  # the range of a fused activation
    high: float | None = None
    convention: Convention | None = None  # how its codes are computed

    def arg(self, i: int, default: object = None) -> Any:
        return self.args[i] if i < len(self.args) else default

    def constant(self, weight: Weight) -> Codes:
        """A weight with one scale as codes."""
        shape, scale = tuple(weight.codes.shape), weight.scales.item()
        result = Codes(weight.name, shape, scale, 0, weight.codes.dtype)
        result.tensors[result.plain] = self.file.tensor(
            weight.name, shape, result.dtype, ([scale], [0], 0), weight.codes
        )
        return result

    def activation(self) -> int:
        name = ACTIVATIONS.get((self.low, self.high))
        if name is None:
            raise NotImplementedError(
                f"TFLite has no fused activation from {self.low} to {self.high}; supported are relu, relu6 and -1 to 1"
            )
        for bound in (self.low, self.high):  # TFLite rounds ties away from zero, hop to even
            if bound and (torch.tensor(bound) / torch.tensor(self.result.scale) * 2).item() % 2 == 1:
                raise NotImplementedError(
                    f"the bound {bound} is halfway between two codes of scale {self.result.scale}"
                )
        return self.file.activation(name)

    def write(self, name: str, inputs: Sequence[int], order: Order, kind: str = "", **options: object) -> None:
        """Add the operator that computes the result."""
        self.result.tensors[order] = self.file.operator(name, inputs, new(self.file, self.result, order), kind, options)

    def write_alike(
        self, source: Codes, name: str, inputs: Sequence[int], order: Order, kind: str = "", **options: object
    ) -> None:
        """Add an operator whose codes have `source`'s scale, then convert to the result's and apply the activation."""
        alike, free = source.is_alike(self.result), (self.low, self.high) == (None, None)
        names = [self.result.name + suffix for suffix in ("_same", "_free")]
        same = replace(source, name=names[0], shape=self.result.shape, tensors={})
        unbounded = self.result if free else replace(self.result, name=names[1], tensors={})
        index = self.file.operator(name, inputs, new(self.file, unbounded if alike else same, order), kind, options)
        if not alike:
            index = self.file.operator("QUANTIZE", [index], new(self.file, unbounded, order), "QuantizeOptions")
        self.result.tensors[order] = index if free else self.bounded(index, order)

    def write_own(self, name: str, inputs: Sequence[int], order: Order, kind: str = "", **options: object) -> None:
        """Add an operator that has no fused activation and returns the result's codes, then apply the activation."""
        self.write_alike(self.result, name, inputs, order, kind, **options)

    def bounded(self, index: int, order: Order) -> int:
        """Apply the activation as a separate operator, on codes with the result's scale."""
        name = ACTIVATIONS.get((self.low, self.high), "")
        if name not in ("RELU", "RELU6"):  # LiteRT's RELU_N1_TO_1 of int8 has 0 as its lower bound
            raise NotImplementedError(f"{self.op} with a range from {self.low} to {self.high} is not supported")
        self.activation()
        info = torch.iinfo(self.result.dtype)
        if name == "RELU6" and round(6.0 / self.result.scale) + self.result.zero > info.max:
            name = "RELU"  # the same codes; TFLM rejects a 6 beyond their range
        return self.file.operator(name, [index], new(self.file, self.result, order))
