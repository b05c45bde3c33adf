"""patch_torch: run PyTorch's out_dtype with ours."""

import contextlib
from collections.abc import Generator
from typing import Any, cast

import torch

from hop.compat import eager, stock
from hop.export.rewrite.stock import difference
from hop.impls.out_dtype import out_dtype


class _Rerouted(type(stock.stock_out_dtype)):
    """PyTorch's operator, forwarding calls to ours if both mean the same.

    This happens before dispatch, so that every mode, transform and tracer sees our operator.
    """

    def __call__(self, op: Any, output_dtype: Any, *args: Any) -> Any:
        known = isinstance(op, eager.OpOverload) and isinstance(output_dtype, torch.dtype)
        if known and op in stock.stock_operators and difference(op, output_dtype, args) is None:
            return out_dtype(cast(Any, op), cast(Any, output_dtype), *args)
        return cast(Any, super().__call__(op, output_dtype, *args))


@contextlib.contextmanager
def patch_torch() -> Generator[None]:
    """Make calls of `torch.ops.higher_order.out_dtype` run `hop.out_dtype`, as a context manager or decorator.

    Such calls get our kernels, gradients and rules for vmap, torch.func and DTensor. Only calls of PyTorch's eight
    inner operators with the same meaning are forwarded; others, and errors, stay PyTorch's. The patch applies to all
    threads of the process, and to all callers: eager code, `module()` of an exported program, `torch.compile`. Tracing
    inside, by torch.export or make_fx, records our operator. Compiled functions are recompiled when called inside and
    again outside; neither uses the other's program.
    """
    with stock.rerouted(_Rerouted):
        yield
