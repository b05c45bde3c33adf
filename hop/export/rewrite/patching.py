"""PyTorch's own out_dtype, run by ours."""

import contextlib
from collections.abc import Generator
from typing import Any, cast

import torch

from hop.compat import eager, stock
from hop.export.rewrite.stock import difference
from hop.impls.out_dtype import out_dtype


class _Rerouted(type(stock.stock_out_dtype)):
    """PyTorch's operator, whose calls go to ours where both mean the same: before the dispatcher is asked, so that
    every mode, transform and tracer meets ours."""

    def __call__(self, op: Any, output_dtype: Any, *args: Any) -> Any:
        known = isinstance(op, eager.OpOverload) and isinstance(output_dtype, torch.dtype)
        if known and op in stock.stock_operators and difference(op, output_dtype, args) is None:
            return out_dtype(cast(Any, op), cast(Any, output_dtype), *args)
        return cast(Any, super().__call__(op, output_dtype, *args))


@contextlib.contextmanager
def patch_torch() -> Generator[None]:
    """Inside, calls of `torch.ops.higher_order.out_dtype` run `hop.out_dtype`: its kernels, its gradient, its rules for
    vmap, torch.func and DTensor. It is a decorator too.

    Calls with equal meaning are taken, of the eight operators that PyTorch's takes; the others, and errors, stay
    PyTorch's. It holds in all threads of the process while any of them is inside, and for whatever makes the call:
    eager code, `module()` of an exported program, `torch.compile`. What is traced inside, by torch.export or make_fx,
    holds nodes of ours. Compiled functions are compiled again inside, and once more outside: neither runs the other's
    program.
    """
    with stock.rerouted(_Rerouted):
        yield
