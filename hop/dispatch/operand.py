"""Operand: a quantized argument as plain tensors, for operators below QuantizedTensor, and its form in a graph.

An argument of an operator is a plain tensor or a quantized one. In a graph, a quantized one is represented by four
arguments,

    quantizer, buffers, usages, shape

where the first is the text of its quantizer, and the others are the arguments of hop_dequantize_buffers. A list of
tensors, as in torch.cat, is represented by its length and then its members.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.compat.pytree import Args
from hop.dispatch.compiled import operators
from hop.numerics import blocks, copies
from hop.numerics.blocks import Block
from hop.numerics.quantizer import Quantizer

T = TypeVar("T")


class Operand(NamedTuple):
    """A quantized argument. Its buffers are attributes with the same names as in QuantizedTensor."""

    quantizer: Quantizer
    tensors: tuple[Tensor, ...]
    usages: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return dict(zip(copies.names(self.quantizer, self.usages), self.tensors, strict=True))

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_"):  # pickle, copy and Dynamo look these up before the fields exist
            raise AttributeError(name)
        if name not in (names := copies.names(self.quantizer, self.usages)):
            raise AttributeError(f"an Operand by {self.quantizer} has no buffer {name!r}")
        return self.tensors[names.index(name)]

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def dim(self) -> int:
        return len(self.shape)

    def fits(self) -> bool:
        """True: the buffers were checked at creation. The method of QuantizedTensor checks them when it is called."""
        return True

    @property
    def block(self) -> Block:
        """The block size along each dimension in the row-wise copy; -1 for a whole dimension."""
        return blocks.per_dimension(self.quantizer.block, len(self.shape))

    @property
    def zero(self) -> Tensor | int:
        """The codes of 0, one for each block, or one for all."""
        return (
            self.zero_point
            if self.quantizer.scale.has_zero_point()
            else self.quantizer.scale.zero(self.quantizer.format)
        )

    def values(self, usage: str = "") -> Tensor:
        """Dequantize to float32, from the copy that `usage` names."""
        copy = self.of(usage) if usage else self
        dequantize = operators["hop_dequantize_buffers"]
        return dequantize(str(copy.quantizer), list(copy.tensors), list(copy.usages), list(copy.shape), torch.float32)

    def of(self, usage: str) -> "Operand":
        """The operand with only one of its copies."""
        if self.usages == (usage,):
            return self
        buffers = self.buffers
        tensors = tuple(buffers[name] for name in copies.names(self.quantizer, (usage,)))
        return self._replace(tensors=tensors, usages=(usage,))


def encode(args: Sequence[object]) -> list[object]:
    """Encode the arguments of an operator, some of them Operands, as they appear in a graph."""
    flat: list[object] = []
    for arg in args:
        if isinstance(arg, Operand):
            flat += [str(arg.quantizer), list(arg.tensors), list(arg.usages), list(arg.shape)]
        elif isinstance(arg, list | tuple) and any(isinstance(x, Tensor | Operand) for x in arg):
            flat += [len(arg), *encode(arg)]
        else:
            flat.append(arg)
    return flat


def decode(op: OpOverload, flat: Sequence[Any]) -> Args:
    """The inverse of `encode`."""
    rest = iter(flat)
    args = []
    for (is_list, is_operand), first in zip(_kinds(op), rest, strict=False):
        if is_list:
            args.append([_operand(x, rest) for x in itertools.islice(rest, first)])
        else:
            args.append(_operand(first, rest) if is_operand else first)
    return tuple(args)


@functools.cache
def _kinds(op: OpOverload) -> list[tuple[bool, bool]]:
    """For each positional argument of an operator, whether it is a list of tensors, and whether it is a tensor."""
    types = [str(argument.type) for argument in op._schema.arguments if not argument.kwarg_only]
    return [(t == "List[Tensor]", "Tensor" in t) for t in types]


def _operand(first: T, rest: Iterator[Any]) -> T | Operand:
    """Decode the operand that begins with `first` and continues in `rest`."""
    if not isinstance(first, str):
        return first
    return Operand(Quantizer.parse(first), tuple(next(rest)), tuple(next(rest)), tuple(next(rest)))
