"""Decompose our operators in exported programs, and look operators up by name."""

from collections.abc import Iterable
from typing import Any

from hop.compat.export import as_decomposition, core_decompositions
from hop.dispatch.hop import Hop, hops
from hop.impls.out_dtype.kernels import with_float_products
from hop.impls.out_dtype.operator import out_dtype_operator
from hop.numerics.spelling import flag, shown


def decompositions(*, keep: Iterable[object] = (), native: bool = False, products: str = "integer") -> Any:
    """PyTorch's default table for `ExportedProgram.run_decompositions`, plus decompositions of our operators.

    After it a program contains only core ATen. Returns a fresh table that the caller may change. Give Inductor and
    AOTInductor programs that still contain our operators: in core ATen they may omit the rounding to a 16-bit dtype.

    Args:
        keep: operators of ours to leave undecomposed: functions such as hop.out_dtype, node targets such as
            torch.ops.higher_order.hop_out_dtype, or their names. The decomposition of another operator may contain
            them:
            hop.scaled decomposes into hop.out_dtype.
        native: only decompose our operators, into operators of the native library, hop_native::*, where its kernels
            support the call, as in eager mode. For AOTInductor packages that run where the library is loaded.
        products: how to decompose products of int8, uint8 and int16. "integer": into int32 products, for which few
            backends have a fast kernel. "float": into float32 products over chunks of K, each converted to int32 and
            added. This gives the same integers, several times faster, on backends that sum and return them in float32,
            also with TF32 or bfloat16 operands. Not for programs that run under torch.autocast, which would return
            bfloat16, nor for backends that compute float32 products in float16.

    Raises:
        TypeError: keep is a string or a single operator.
        ValueError: keep names no operator of ours, or products is invalid.
    """
    if isinstance(keep, str | Hop) or callable(keep) or not isinstance(keep, Iterable):
        raise TypeError(f"decompositions: keep must be a list, got {shown(keep)}; give a list of one for one operator")
    flag(native, "decompositions: native")
    if products not in ("integer", "float"):
        raise ValueError(
            f'decompositions: products must be "integer" or "float", got {shown(products)}; use one of these'
        )
    kept = set[str]()
    for x in keep:
        if not (operators := operators_named(x)):
            known = ", ".join(sorted(h.name() for h in hops))
            raise ValueError(
                f"decompositions: keep must name operators of ours, which are {known}; got {x!r}; use such names"
            )
        kept.update(h.name() for h in operators)
    table = {} if native else core_decompositions()
    for hop in hops:
        if hop.name() not in kept:
            meaning = with_float_products if hop is out_dtype_operator and products == "float" else hop.reference
            table[hop] = as_decomposition(hop.kept_native if native else meaning)
    return table


def operators_named(x: object) -> list[Hop[object]]:
    """Our operators for a function of ours, an operator or a name; an empty list if there are none.

    For example hop.scaled and "scaled" stand for hop_scaled and hop_scaled_buffers.
    """
    if isinstance(x, Hop):
        return [x]
    is_ours = callable(x) and getattr(x, "__module__", "").startswith("hop.")
    name = x if isinstance(x, str) else getattr(x, "__name__", "") if is_ours else ""
    if exact := [h for h in hops if h.name() == name]:
        return exact
    name = f"hop_{name.removeprefix('hop.')}"
    return [h for h in hops if name != "hop_" and (h.name() == name or h.name().startswith(f"{name}_"))]
