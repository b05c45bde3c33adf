"""Merge the masks of an attention into one additive mask."""

import math

import torch
from torch import Tensor
from torch.nn import functional


def merged(
    attention: Tensor | None, padding: Tensor | None, q: Tensor, heads: int, keys: int, added: int
) -> Tensor | None:
    """The sum of both masks as an additive mask, in the dtype of q; None if there is none.

    Args:
        attention: attn_mask, (L, keys) or (N · heads, L, keys): bool, where True masks out, or float to be added.
        padding: key_padding_mask, (N, keys), or (keys,) without a batch; same dtypes.
        q: (N, L, E).
        added: how many keys follow that are never masked.

    Returns:
        (N or 1, heads or 1, L, keys + added).

    Raises:
        ValueError: a mask has another shape.
        TypeError: a mask has another dtype.
    """
    n, length = q.shape[:2]
    masks: list[Tensor] = []
    if attention is not None:
        shapes = ((length, keys), (n * heads, length, keys))
        _check("attn_mask", attention, shapes)
        masks.append(attention if attention.dim() == 2 else attention.unflatten(0, (n, heads)))
    if padding is not None:
        _check("key_padding_mask", padding, ((n, keys), *[(keys,)] * (n == 1)))
        masks.append(padding.reshape(n, 1, 1, keys))
    floats = [functional.pad(_added(mask, q.dtype), (0, added)) for mask in masks]
    return None if not floats else floats[0] if len(floats) == 1 else floats[0] + floats[1]


def _check(name: str, mask: Tensor, shapes: tuple[tuple[int, ...], ...]) -> None:
    if tuple(mask.shape) not in shapes:
        raise ValueError(
            f"hop.nn.MultiheadAttention: {name} must have the shape {' or '.join(map(str, shapes))}, got "
            f"{tuple(mask.shape)}; expand it"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"hop.nn.MultiheadAttention: {name} must be bool or floating point, got {mask.dtype}; cast it to torch.bool"
        )


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask to floats that are added to scores: -inf where a bool mask is True."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
