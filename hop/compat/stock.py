"""PyTorch's own out_dtype operator."""

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence

import torch
from torch._higher_order_ops.out_dtype import ALLOWABLE_OPS
from torch._higher_order_ops.out_dtype import out_dtype as stock_out_dtype
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from hop.compat.values import STATE

stock_operators = frozenset(ALLOWABLE_OPS)
"""The operators that torch.ops.higher_order.out_dtype supports."""


def stock_common_dtype(output_dtype: torch.dtype, args: Sequence[object]) -> torch.dtype | None:
    """The dtype that torch.ops.higher_order.out_dtype casts its operands to; None if it rejects them."""
    leaves = [x for x in tree_leaves(args) if x is not None]
    try:
        return elementwise_dtypes(
            *leaves, _one_of(output_dtype), type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
        )[0]
    except (RuntimeError, ValueError):
        return None


@functools.cache
def _one_of(dtype: torch.dtype) -> torch.Tensor:
    """A tensor with a dimension, created without active modes observing it."""
    with no_dispatch():
        return torch.empty(1, dtype=dtype, device="meta")


_rerouting = threading.Lock()


_reroutes: list[type] = []


_Stock = type(stock_out_dtype)

STATE.append(lambda: "" if type(stock_out_dtype) is _Stock else f"out_dtype {type(stock_out_dtype).__qualname__}")


@contextlib.contextmanager
def rerouted(cls: type) -> Iterator[None]:
    """A context in which torch.ops.higher_order.out_dtype is an instance of `cls`, a subclass of its class, in all
    threads.

    The last context to end restores the original class. Rules registered by py_impl would not do: they cannot be
    removed or replaced, and no cache of compiled programs would depend on them. The class is one attribute: Dynamo
    guards traced code on it, and it is part of the keys of caches on disk.
    """
    with _rerouting:
        _reroutes.append(cls)
        stock_out_dtype.__class__ = cls
    try:
        yield
    finally:
        with _rerouting:
            _reroutes.remove(cls)
            stock_out_dtype.__class__ = _reroutes[-1] if _reroutes else _Stock
