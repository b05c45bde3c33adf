"""explain: which implementation a call takes."""

from collections.abc import Sequence
from typing import Any, cast

from hop.impls.out_dtype import explain as explain_out_dtype
from hop.impls.scaled import explain as explain_scaled
from hop.numerics.quantizer import Quantizer
from hop.tensor import QuantizedTensor


def explain(op: Any, output: Any, /, *args: Any, **kwargs: Any) -> str:
    """Which implementation a call of `hop.scaled` or `hop.out_dtype` takes, and why each one before it declined.

    Args:
        op, output, args, kwargs: what the operator is called with. With a QuantizedTensor among them, or a Quantizer as
            output, it is `hop.scaled`, else `hop.out_dtype`.

    Returns:
        A line for each kernel that was asked.

    Raises: what the operator raises for these arguments.
    """
    given: list[Any] = []
    for a in (*args, *kwargs.values()):
        given += cast(Sequence[Any], a) if isinstance(a, list | tuple) else [a]
    is_scaled = isinstance(output, Quantizer) or any(isinstance(x, QuantizedTensor) for x in given)
    explained: Any = explain_scaled if is_scaled else explain_out_dtype
    return explained(op, output, *args, **kwargs)
