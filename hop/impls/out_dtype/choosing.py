"""Integer forms of operators that select elements, for which ATen has only float kernels."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.dispatch.operators import MAXIMUM, NEAREST, aten, of, within

# by item size: the float dtype that represents such integers exactly
_EXACT = {1: torch.float32, 2: torch.float32, 4: torch.float64}
_EXACT_NEAREST = (aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d)


def form(op: OpOverload) -> Callable[..., Tensor] | None:
    """The function that computes `op` on integers, called as form(op, *args, **kwargs); None if ATen has a kernel."""
    return _FORMS.get(op)


def _max_pool(op: OpOverload, x: Tensor, *args: object) -> Tensor:
    """Max-pool integers on the CPU, 1-D pooling through 2-D; on other devices in an exact float dtype."""
    exact = _EXACT.get(x.dtype.itemsize)
    if x.device.type != "cpu" and exact is not None:
        return op(x.to(exact), *args).to(x.dtype)
    if of(op).spatial != 1:
        return op(x, *args)
    padded = [[*one, *v] if v else v for one, v in zip(([1], [1], [0], [1]), args, strict=False)]  # type: ignore[misc]
    return aten.max_pool2d.default(x.unsqueeze(-2), *padded, *args[4:]).squeeze(-2)


def _nearest(op: OpOverload, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Select the elements that the operator selects from a float32 tensor, one dimension at a time."""
    spatial: Sequence[object] = x.shape[2:]
    for i, size in enumerate(spatial):
        others = [size if j == i else 1 for j in range(len(spatial))]
        places = torch.arange(size, dtype=torch.float32, device=x.device).view(1, 1, *others).expand(1, 1, *spatial)
        taken = op(places, *args, **kwargs).movedim(i + 2, -1).flatten(0, -2)[0]
        x = x.index_select(i + 2, taken.to(torch.int64))
    return x


_FORMS: dict[OpOverload, Callable[..., Tensor]] = {
    **dict.fromkeys(within(MAXIMUM), _max_pool),
    **dict.fromkeys(within(NEAREST), _nearest),
    **dict.fromkeys((getattr(packet, name) for packet in _EXACT_NEAREST for name in ("default", "vec")), _nearest),
}
