"""Our operators as decompositions of exported programs, and by name."""

from collections.abc import Iterable
from typing import Any

from hop.compat.export import as_decomposition, core_decompositions
from hop.dispatch.hop import Hop, hops
from hop.impls.out_dtype.kernels import with_float_products
from hop.impls.out_dtype.operator import out_dtype_operator
from hop.numerics.spelling import flag, shown


def decompositions(*, keep: Iterable[Any] = (), native: bool = False, products: str = "integer") -> Any:
    """PyTorch's default decomposition table for `ExportedProgram.run_decompositions`, plus our operators: what is left
    afterwards is core ATen. Returns a fresh table that the caller may change.

    Args:
        keep: operators of ours that stay as they are: functions such as hop.out_dtype, nodes' targets such as
            torch.ops.higher_order.hop_out_dtype, or their names. What others become may hold them: hop.scaled is made
            of hop.out_dtype.
        native: only our operators, which become those of the native library, hop_native::*, where its kernels take a
            call, as in eager mode: for packages of AOTInductor that run where the library is loaded.
        products: what products of int8, uint8 and int16 become. "integer": products of int32, which few backends have a
            fast kernel for. "float": float32 products over chunks of K, each converted to int32 and added: the same
            integers, several times faster, on a backend that sums and returns them in float32, in TF32 or from bfloat16
            operands too. Not for programs that run under torch.autocast, which would return them in bfloat16, nor where
            a backend computes float32 products in float16.

    Raises TypeError for a string, and ValueError for what names no operator of ours, or other products.
    """
    if isinstance(keep, str | Hop) or callable(keep) or not isinstance(keep, Iterable):
        raise TypeError(f"decompositions: keep must be a list, got {shown(keep)}; give a list of one for one operator")
    flag(native, "decompositions: native")
    if products not in ("integer", "float"):
        raise ValueError(
            f'decompositions: products must be "integer" or "float", got {shown(products)}; take one of these'
        )
    kept = set[str]()
    for x in keep:
        if not (operators := operators_named(x)):
            known = ", ".join(sorted(h.name() for h in hops))
            raise ValueError(
                f"decompositions: keep must name operators of ours, which are {known}; got {x!r}; take names of these"
            )
        kept.update(h.name() for h in operators)
    table: Any = {} if native else core_decompositions()
    for hop in hops:
        if hop.name() not in kept:
            meaning = with_float_products if hop is out_dtype_operator and products == "float" else hop.reference
            table[hop] = as_decomposition(hop.kept_native if native else meaning)
    return table


def operators_named(x: Any) -> list[Hop]:
    """Our operators that a function of ours, an operator or a name stands for: hop.scaled and "scaled" for hop_scaled
    and hop_scaled_buffers. None for others."""
    if isinstance(x, Hop):
        return [x]
    is_ours = callable(x) and getattr(x, "__module__", "").startswith("hop.")
    name = x if isinstance(x, str) else getattr(x, "__name__", "") if is_ours else ""
    if exact := [h for h in hops if h.name() == name]:
        return exact
    name = f"hop_{name.removeprefix('hop.')}"
    return [h for h in hops if name != "hop_" and (h.name() == name or h.name().startswith(f"{name}_"))]
