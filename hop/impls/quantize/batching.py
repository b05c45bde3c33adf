"""quantize and fake_quantize under vmap: all members of a batch at once, each with separate scales."""

from collections.abc import Sequence

from torch import Tensor

from hop.numerics.quantizer import Quantizer


def operands(
    q: Quantizer, size: int, dims: Sequence[int | None], x: Tensor, *others: Tensor | None
) -> tuple[Quantizer, list[Tensor | None]] | None:
    """A quantizer for the whole batch, and the tensors with the batch first; None if a block would span members.

    `others` are the scale, the zero point and the noise, each with the shape for one member.
    """
    front = [None if t is None else _front(t, dim, size) for t, dim in zip((x, *others), dims, strict=True)]
    member = x.shape[: dims[0]] + x.shape[dims[0] + 1 :] if dims[0] is not None else x.shape
    if q.flat:
        if member.numel() % q.block[0]:
            return None
        codes, *scales = front[0], *(None if t is None else t.flatten(0, 1) for t in front[1:3])
        return q, [codes, *scales, front[3]]
    return q.of_batch(len(member)), front


def _front(t: Tensor, dim: int | None, size: int) -> Tensor:
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
