"""A node of an ONNX file while it is converted, and the integers of shapes that are known while a program is traced."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar, overload

import torch
from torch import Tensor

from hop.export.targets.onnx_import.reading import Constant, FileNode
from hop.numerics.spelling import shown

Units = tuple[float, int]


class Numbers(NamedTuple):
    """Integers or booleans that are known while a program is traced: sizes, axes, and what is computed from them."""

    values: tuple[Any, ...]  # int, SymInt or bool
    rank: int  # 0 or 1
    dtype: torch.dtype = torch.int64
    stored: Tensor | None = None  # the same as a tensor of the program

    def tensor(self) -> Tensor:
        if self.stored is not None:
            return self.stored
        if all(isinstance(v, int) for v in self.values):
            x = torch.tensor(self.values, dtype=self.dtype)
        else:
            x = torch.stack([torch.scalar_tensor(v, dtype=self.dtype) for v in self.values])
        return x if self.rank else x.reshape(())


class Shifted(NamedTuple):
    """uint16 codes as int16 codes, which are 32768 less: a program computes with int16."""

    codes: Tensor

    def tensor(self) -> Tensor:
        return (self.codes.to(torch.int32) + SHIFT).to(torch.uint16)

    @classmethod
    def of(cls, codes: Tensor) -> "Shifted":
        """The codes of a uint16 tensor."""
        return cls((codes.to(torch.int32) - SHIFT).to(torch.int16))


SHIFT = 2**15
Value: TypeAlias = Tensor | Numbers | Shifted
"""The value of an input or result."""
_T = TypeVar("_T", int, float, str)


def numbers_or(x: Constant, stored: Tensor) -> Numbers | Tensor:
    """A constant, whose tensor in the program is `stored`, as Numbers if it has few integers in one dimension."""
    if x.elements is None or x.data.dim() > 1 or x.data.dtype not in (torch.int32, torch.int64, torch.bool):
        return stored
    return Numbers(x.elements, x.data.dim(), x.data.dtype, stored)


class Call:
    """A node of the file while it is converted.

    Attributes and inputs that no accessor has returned are refused afterwards, by `check_read`.

    Args:
        node: the node.
        inputs: the values of its inputs: tensors, Numbers, or None for an omitted one.
        known: those of its inputs that are constants.
        units: the scale and zero point of each input of codes, as far as the file tells them.
        opset: the version of the operators.
        folds: whether the inputs are real tensors, whose result becomes a constant.
    """

    def __init__(
        self,
        node: FileNode,
        inputs: Sequence[Any],
        known: Sequence[Constant | None],
        units: Sequence[Units | None],
        opset: int,
        folds: bool,
    ) -> None:
        self.node, self.inputs, self.known, self.units = node, inputs, known, units
        self.opset, self.folds = opset, folds
        self.result_units: Units | None = None  # set by a converter that returns codes
        self.is_quantized = False  # whether it was converted to quantize or dequantize operators
        self._read: set[int | str] = set()

    def refuse(self, why: str) -> NoReturn:
        raise NotImplementedError(why)

    @overload
    def attribute(self, name: str, default: None) -> Any: ...
    @overload
    def attribute(self, name: str, default: _T) -> _T: ...
    def attribute(self, name: str, default: object) -> object:
        """An attribute, which must have the type of `default`, or of its elements; any type if that is None."""
        self._read.add(name)
        value = self.node.attributes.get(name, default)
        wanted = (int, float) if isinstance(default, float) else type(default)
        if default is not None and not isinstance(value, wanted):
            self.refuse(f"its attribute {name} is {shown(value)}, and must be of the type {type(default).__name__}")
        return value

    def integers(self, name: str) -> list[int] | None:
        """An attribute that is a list of integers, None if it is missing."""
        value = self.attribute(name, None)
        if value is not None and not (isinstance(value, list) and all(isinstance(n, int) for n in value)):
            self.refuse(f"its attribute {name} is {shown(value)}, and must be a list of integers")
        return value

    def only(self, name: str, default: _T, *more: _T) -> _T:
        """An attribute of which only some values are supported."""
        value = self.attribute(name, default)
        if value not in (default, *more):
            allowed = " or ".join(map(repr, (default, *more)))
            self.refuse(f"its attribute {name} is {shown(value)}, and only {allowed} is supported")
        return value

    def mark_read(self, *places: int | str) -> None:
        """Do not refuse these inputs and attributes, which have no effect or are read otherwise."""
        self._read.update(places)

    def has(self, i: int) -> bool:
        """Whether an input is given."""
        self._read.add(i)
        return i < len(self.inputs) and self.inputs[i] is not None

    def tensor(self, i: int) -> Tensor:
        """An input as a tensor."""
        if not self.has(i):
            self.refuse(f"its input {i} is missing")
        x = self.inputs[i]
        return x.tensor() if isinstance(x, Numbers | Shifted) else x

    def optional(self, i: int) -> Tensor | None:
        return self.tensor(i) if self.has(i) else None

    def tensors(self) -> list[Tensor]:
        """All inputs as tensors."""
        return [self.tensor(i) for i in range(len(self.inputs))]

    def constant(self, i: int) -> Constant:
        """An input that is a constant."""
        if not self.has(i) or (known := self.known[i]) is None:
            self.refuse(f"its input {i} is not a constant")
        return known

    def numbers(self, i: int) -> list[Any]:
        """An input of sizes or axes."""
        if not self.has(i) or not isinstance(x := self.inputs[i], Numbers):
            self.refuse(f"its input {i} is not an integer constant or computed from sizes, with up to 64 elements")
        return list(x.values)

    def number(self, i: int) -> float | int | None:
        """An input that is a constant with one element, None if it is omitted."""
        if not self.has(i):
            return None
        if isinstance(x := self.inputs[i], Numbers) and len(x.values) == 1:
            return x.values[0]
        elements = self.constant(i).elements
        if elements is None or len(elements) != 1:
            shape = tuple(self.constant(i).data.shape)
            self.refuse(f"its input {i} has the shape {shape}, and must have one element")
        return elements[0]

    def axes(self, rank: int, i: int = 1) -> list[int] | None:
        """The dimensions in the attribute or the input named axes, from 0; None if there are none."""
        given = self.integers("axes")
        if given is None and self.has(i):
            given = self.numbers(i)
        return None if given is None else [self.axis(a, rank) for a in given]

    def axis(self, given: int, rank: int) -> int:
        """A dimension from 0."""
        if not -rank <= given < rank:
            raise IndexError(f"its axis is {given}, and must be from {-rank} to {rank - 1}")
        return given % rank

    def check_read(self) -> None:
        """Raise NotImplementedError for an attribute or input that the converter has not read."""
        attributes = [name for name in self.node.attributes if name not in self._read]
        if attributes:
            self.refuse(f"its attribute {shown(attributes[0])} is not supported; remove it if it has no effect")
        inputs = [i for i, x in enumerate(self.inputs) if x is not None and i not in self._read]
        if inputs:
            self.refuse(f"its input {inputs[0]} is not supported")


Converter: TypeAlias = Callable[[Call], Value | tuple[Value, ...]]
"""Converts a node; raises NotImplementedError for an unsupported one."""
