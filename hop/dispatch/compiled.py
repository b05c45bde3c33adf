"""The ATen-level operator that stands for ours in programs that torch.compile runs in this process.

    hop::run(operator, arguments, tensors, sizes) -> tensors

It calls one of our operators in eager mode, where a kernel that is no ATen operator takes it; a program thus runs the
same kernels as eager mode does. `arguments` is JSON: tensors and symbolic sizes stand in it by their place in the
lists, operators and dtypes by their names.
"""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat import inductor
from hop.compat.eager import OpOverload
from hop.numerics import memory_format, spelling

_library = torch.library.Library("hop", "FRAGMENT")
_library.define(
    "run(str operator, str arguments, Tensor[] tensors, SymInt[] sizes) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),  # on which those of the results depend
)
inductor.stores_results(torch.ops.hop.run.default)
operators: dict[str, Any] = {}
"""Ours, by their names."""


def register(name: str, operator: Any) -> None:
    """Let hop::run know one of our operators by its name."""
    operators[name] = operator


def call(name: str, args: Sequence[Any]) -> list[Tensor]:
    """The node that calls the operator `name`."""
    tensors: list[Tensor] = []
    sizes: list[Any] = []
    arguments = json.dumps([_spelled(x, tensors, sizes) for x in args])
    return torch.ops.hop.run.default(name, arguments, tensors, sizes)


def _spelled(x: Any, tensors: list[Tensor], sizes: list[Any]) -> Any:
    if isinstance(x, Tensor):
        tensors.append(x)
        return {"tensor": len(tensors) - 1}
    if isinstance(x, torch.SymInt):
        sizes.append(x)
        return {"size": len(sizes) - 1}
    if isinstance(x, torch.dtype):
        return {"dtype": str(x)}
    if isinstance(x, OpOverload):
        return {"operator": str(x)}
    if isinstance(x, list | tuple):
        return [_spelled(v, tensors, sizes) for v in x]
    if x is None or isinstance(x, bool | int | float | str):
        return x
    raise TypeError(f"{type(x).__name__} cannot stand in a compiled program")


_Read = Callable[[Sequence[Tensor], Sequence[int]], Any]


@functools.lru_cache(maxsize=4096)
def _parsed(arguments: str) -> tuple[_Read, ...]:
    return tuple(_reader(x) for x in json.loads(arguments))


def _reader(x: Any) -> _Read:
    if isinstance(x, list):
        parts = [_reader(v) for v in x]
        return lambda tensors, sizes: [part(tensors, sizes) for part in parts]
    if not isinstance(x, dict):
        return lambda tensors, sizes: x
    ((kind, value),) = x.items()
    if kind == "tensor":
        return lambda tensors, sizes: tensors[value]
    if kind == "size":
        return lambda tensors, sizes: sizes[value]
    constant = spelling.dtype(value) if kind == "dtype" else _overload(value)
    return lambda tensors, sizes: constant


def _overload(name: str) -> OpOverload:
    namespace, packet, overload = name.split(".")
    result = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(result, OpOverload):
        raise ValueError(f"{spelling.shown(name)} is no operator of torch.ops")
    return result


def _listed(result: Any) -> list[Tensor]:
    return result if isinstance(result, list) else [result]


def _run(operator: str, arguments: str, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    args = [read(tensors, sizes) for read in _parsed(arguments)]
    return _listed(operators[operator].in_program(*args))


def _describe(operator: str, arguments: str, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
    args = [read(tensors, sizes) for read in _parsed(arguments)]
    return [memory_format.dense(x) for x in _listed(operators[operator].fake(*args))]


_library.impl("run", _run, "CompositeExplicitAutograd")
torch.library.register_fake("hop::run", _describe, lib=_library)
