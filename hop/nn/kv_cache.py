"""KVCache: the keys and values of tokens that an attention has seen, as codes and scales in buffers of fixed shape."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat import eager
from hop.nn.attending import attend, prepared, rotated_size
from hop.nn.static import Float32State
from hop.numerics import blocks, copies, presets
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import shown
from hop.tensor import QuantizedTensor

_TOKENS = 2  # the dimension of tokens


class KVCache(Float32State):
    """Keys and values of an attention, as codes: (batch, heads, length, head_dim), of which the first tokens are held.

    Each token is quantized when it comes, by itself, and never again. Its buffers are those of `quantizer`, named
    `key_codes`, `key_scale`, ..., `value_codes`, ..., and `length`, int64 of shape (): how many tokens have come. All
    have fixed shapes and change in place, so that a compiled or exported program stays the same while it fills. What is
    not held has a scale of 0. Gradients do not pass.

    Args:
        shape: (batch, heads, length, head_dim) of the keys.
        quantizer: of the keys: integers or floats, whose scales belong to one token each, or to a part of one:
            hop.presets.INT8_ROW, INT4_32, FP8_ROW, MXFP8, ...
        value_quantizer: of the values; None for the same.
        value_dim: the width of the values; None for head_dim.
        rotated: whether keys are transformed before they are quantized, as by an AttentionScheme that says so; queries
            have to be, too, as `forward` does. A state_dict then has `rotation`, how many elements are transformed
            together.
        dtype: the floating-point dtype in which they appear.
        device: where the buffers lie.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a token's codes would depend on others, or on a scale that the caller gives; or keys and values are
            not both integers, or both floats.
    """

    length: Tensor
    key_codes: Tensor
    rotation: Tensor | None

    def __init__(
        self,
        shape: Sequence[int],
        quantizer: Quantizer = presets.INT8_ROW,
        *,
        value_quantizer: Quantizer | None = None,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        rotated: bool = False,
    ) -> None:
        super().__init__()
        sizes = blocks.checked_shape("KVCache", shape)
        if len(sizes) != 4:
            raise ValueError(f"KVCache: shape must be (batch, heads, length, head_dim), got {sizes}; give four sizes")
        if dtype not in copies.APPEARANCES:
            raise TypeError(f"KVCache: dtype must be floating point, got {dtype!r}; take one such as torch.bfloat16")
        values = quantizer if value_quantizer is None else value_quantizer
        _check("quantizer", quantizer)
        _check("value_quantizer", values)
        if quantizer.format.is_integer != values.format.is_integer:
            raise ValueError(
                f"KVCache: quantizer and value_quantizer must both be of integers, or both of floats, as attention "
                f"takes them; got {quantizer} and {values}"
            )
        if not isinstance(rotated, bool):
            raise TypeError(f"KVCache: rotated must be True or False, got {rotated!r}; give one of them")
        width = sizes[-1] if value_dim is None else value_dim
        self.dtype, self.rotated = dtype, rotated
        self.quantizers, self.widths = {"key": quantizer, "value": values}, {"key": sizes[-1], "value": width}
        self.parts = {of: copies.names(q, (copies.ROWWISE,)) for of, q in self.quantizers.items()}
        for of, q in self.quantizers.items():
            for name, (size, stored) in q.buffers((*sizes[:-1], self.widths[of])).items():
                self.register_buffer(f"{of}_{name}", torch.zeros(size, dtype=stored, device=device))
        self.register_buffer("length", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("rotation", torch.tensor(rotated_size(sizes[-1]), device=device) if rotated else None)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, head_dim) of the keys."""
        batch, heads, length = self.key_codes.shape[:3]
        return batch, heads, length, self.widths["key"]

    @property
    def key(self) -> QuantizedTensor:
        """All keys, those included that are not there yet: a view of the buffers. Of a rotated cache rotated ones."""
        return self._tensor("key", {name: getattr(self, f"key_{name}") for name in self.parts["key"]})

    @property
    def value(self) -> QuantizedTensor:
        """All values, likewise."""
        return self._tensor("value", {name: getattr(self, f"value_{name}") for name in self.parts["value"]})

    @torch.no_grad()
    def append(
        self, key: Tensor, value: Tensor, positions: Tensor | None = None
    ) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Quantize the keys and values of further tokens, and write them at their positions.

        Args:
            key: (batch, heads, T, head_dim), floating point.
            value: (batch, heads, T, value_dim).
            positions: int64 (T,), from 0 to below `length`, without gaps before them; None for those that follow.

        Returns:
            All keys and all values, as `key` and `value` have them.

        Raises:
            ValueError: a shape does not fit; or, in eager mode on the CPU, a position.
        """
        new = self._quantized(key, value)
        return self._written(new, *self._places(key.shape[_TOKENS], positions))

    @torch.no_grad()
    def slide(self, key: Tensor, value: Tensor, size: int | None = None) -> tuple[QuantizedTensor, QuantizedTensor]:
        """As `append`, of a window of the last `size` tokens, None for as many as there is room for: the token at
        position p lies in slot p modulo size.

        Returns:
            Keys and values of the tokens that were held and of the new ones, (batch, heads, size + T, ...), from the
            first of them on; of which the last are not there where there was room.

        Raises:
            ValueError: a shape does not fit; or size is above the length.
        """
        new, device, count = self._quantized(key, value), self.length.device, key.shape[_TOKENS]
        size = self.shape[_TOKENS] if size is None else size
        if not 0 <= size <= self.shape[_TOKENS]:
            raise ValueError(f"KVCache: size must be from 0 to the length, {self.shape[_TOKENS]}, got {size}")
        if self._is_known() and (at := int(self.length)) + count <= size and size + count <= self.shape[_TOKENS]:
            self._written(new, at, at + count)  # no token moves
            key_of, value_of = ({n: self._first(of, n, size + count) for n in buffers} for of, buffers in new.items())
            return self._tensor("key", key_of), self._tensor("value", value_of)
        kept, gone = self.length.clamp(max=size), (self.length - size).clamp(min=0)
        order = (gone + torch.arange(size, device=device)) % max(size, 1)
        places, last = kept + torch.arange(count, device=device), min(count, size)
        slots = (self.length + torch.arange(count - last, count, device=device)) % max(size, 1)
        whole: dict[str, QuantizedTensor] = {}
        for of, buffers in new.items():
            slid: dict[str, Tensor] = {}
            for name, t in buffers.items():
                own, t_bytes = _bytes(getattr(self, f"{of}_{name}")), _bytes(t)
                both = torch.cat([own.index_select(_TOKENS, order), t_bytes], _TOKENS)
                slid[name] = both.index_copy_(_TOKENS, places, t_bytes).view(t.dtype)
                own.index_copy_(_TOKENS, slots, t_bytes.narrow(_TOKENS, count - last, last))
            whole[of] = self._tensor(of, slid)
        self.length.add_(count)
        return whole["key"], whole["value"]

    @torch.no_grad()
    def put(self, key: Tensor, value: Tensor, slots: Tensor, count: int) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Quantize tokens, and write them where the caller says; `length` stays as it is. For programs whose caller
        counts, and reads no more than there is.

        Args:
            key, value: as for append.
            slots: int64 (T,), below `length` of the shape.
            count: how many slots are read.

        Returns:
            Keys and values of the first `count` slots, as they lie: views of the buffers.
        """
        whole: dict[str, QuantizedTensor] = {}
        for of, buffers in self._quantized(key, value).items():
            written: dict[str, Tensor] = {}
            for name, t in buffers.items():
                own = getattr(self, f"{of}_{name}")
                _bytes(own).index_copy_(_TOKENS, slots, _bytes(t))
                written[name] = own.narrow(_TOKENS, 0, count)
            whole[of] = self._tensor(of, written)
        return whole["key"], whole["value"]

    def mask(self, positions: Tensor, window: int | None = None) -> Tensor:
        """Which tokens queries see: bool (T, length), True for those up to their own positions, int64 (T,); with a
        window, for the last so many of them."""
        slots, own = torch.arange(self.shape[_TOKENS], device=positions.device), positions.unsqueeze(-1)
        seen = slots <= own
        return seen if window is None else seen & (slots > own - window)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Append, and attend: each token to those up to itself.

        Args:
            query: (batch, heads of queries, T, head_dim), which the cache's heads divide.
            key, value, positions: as for append.
            mask: bool, broadcastable to (batch, heads, T, length): False for what is hidden besides, such as padding.
            scale: of the scores, None for 1 / sqrt(head_dim).

        Returns:
            (batch, heads of queries, T, value_dim), in the dtype of query.
        """
        with torch.no_grad():
            new, count = self._quantized(key, value), key.shape[_TOKENS]
            places, length = self._places(count, positions)
            keys, values = self._written(new, places, length)
            if isinstance(places, int):
                places = torch.arange(places, places + count, device=self.length.device)
        seen = self.mask(places)
        seen = seen if mask is None else seen & mask
        return attend(None, query, keys, values, seen, scale=scale, rotated=self.rotated)

    @torch.no_grad()
    def crop(self, length: int | Tensor) -> None:
        """Forget the tokens from position `length` on."""
        self.length.clamp_(max=length)
        gone = torch.arange(self.shape[_TOKENS], device=self.length.device) >= self.length
        for name in self._names():
            getattr(self, name).view(torch.uint8).masked_fill_(gone.unsqueeze(-1), 0)

    @torch.no_grad()
    def select(self, indices: Tensor) -> None:
        """Let each sequence of the batch be the one that `indices`, int64, name: in place where their number stays."""
        for name in self._names():
            own: Tensor = getattr(self, name)
            selected = own.index_select(0, indices.to(own.device))
            if selected.shape == own.shape:
                own.copy_(selected)
            else:
                setattr(self, name, selected)

    def reset(self) -> None:
        """Forget all tokens."""
        self.crop(0)

    def extra_repr(self) -> str:
        of = self.quantizers
        values = "" if of["value"] == of["key"] else f", values={of['value']}"
        rotated = ", rotated=True" if self.rotated else ""
        return f"shape={self.shape}, {of['key']}{values}, dtype={self.dtype}{rotated}"

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        is_rotated = f"{prefix}rotation" in state_dict
        if is_rotated != self.rotated and f"{prefix}key_codes" in state_dict:  # by strict=False, too
            *_, messages = args
            messages.append(
                f"KVCache: {prefix}key_codes are {'' if is_rotated else 'not '}rotated, and this cache has rotated="
                f"{self.rotated}; make one with rotated={is_rotated}"
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)

    # ---- parts

    def _names(self) -> list[str]:
        """The buffers of codes and of what stands beside them."""
        return [f"{of}_{name}" for of, names in self.parts.items() for name in names]

    def _tensor(self, of: str, buffers: dict[str, Tensor]) -> QuantizedTensor:
        q, codes = self.quantizers[of], buffers["codes"]
        shape = (*codes.shape[:3], self.widths[of])
        if torch.compiler.is_compiling():  # Dynamo knows the class
            return QuantizedTensor(buffers, q, shape, self.dtype)
        if codes.is_cpu and q.per_byte() == 1 and codes.is_contiguous() and eager.is_plain_eager():
            return QuantizedTensor.fresh(tuple(buffers), tuple(buffers.values()), q, shape, self.dtype)
        return QuantizedTensor.fitting(buffers, q, shape, self.dtype)

    def _first(self, of: str, name: str, count: int) -> Tensor:
        """The first `count` tokens of a buffer."""
        own: Tensor = getattr(self, f"{of}_{name}")
        return own if own.shape[_TOKENS] == count else own.narrow(_TOKENS, 0, count)

    def _is_known(self) -> bool:
        """Whether the length is a number at no cost."""
        return not torch.compiler.is_compiling() and eager.is_plain_eager() and self.length.is_cpu

    def _written(
        self, new: dict[str, dict[str, Tensor]], places: Tensor | int, length: Tensor | int
    ) -> tuple[QuantizedTensor, QuantizedTensor]:
        whole: dict[str, QuantizedTensor] = {}
        for of, buffers in new.items():
            stored = {name: getattr(self, f"{of}_{name}") for name in buffers}
            for name, t in buffers.items():
                if isinstance(places, int):  # a copy to a view takes half the time of one by index
                    stored[name].narrow(_TOKENS, places, t.shape[_TOKENS]).copy_(t)
                else:
                    _bytes(stored[name]).index_copy_(_TOKENS, places, _bytes(t))
            whole[of] = self._tensor(of, stored)
        if isinstance(length, int):
            self.length.fill_(length)
        else:
            self.length.copy_(length)
        return whole["key"], whole["value"]

    def _quantized(self, key: Tensor, value: Tensor) -> dict[str, dict[str, Tensor]]:
        """The buffers of new tokens."""
        result: dict[str, dict[str, Tensor]] = {}
        batch, heads = self.key_codes.shape[:2]
        for of, x in (("key", key), ("value", value)):
            self._check_new(of, x, key, batch, heads)
            t = prepared(self.quantizers[of], x.detach(), self.rotated and of == "key")
            result[of] = {name: getattr(t, name) for name in self.parts[of]}
        return result

    def _check_new(self, of: str, x: Any, key: Tensor, batch: int, heads: int) -> None:
        if not isinstance(x, Tensor) or isinstance(x, QuantizedTensor):
            raise TypeError(f"KVCache: {of} must be a plain tensor, got {shown(x)}; give floats, which it quantizes")
        count = key.shape[_TOKENS] if key.dim() == 4 else None
        if x.dim() != 4 or tuple(x.shape) != (batch, heads, count, self.widths[of]):
            raise ValueError(
                f"KVCache: {of} must be (batch, heads, tokens, width) = ({batch}, {heads}, T, {self.widths[of]}), with "
                f"one T for keys and values, got {tuple(x.shape)}; make a cache of this shape"
            )

    def _places(self, count: int, positions: Tensor | None) -> tuple[Tensor | int, Tensor | int]:
        """The positions of `count` tokens, and the length with them; as numbers, the first one's and the length, where
        these are known and the tokens follow each other."""
        size, known = self.key_codes.shape[_TOKENS], self._is_known()
        if positions is None:
            if known:
                least = int(self.length)
                if least + count > size:
                    raise ValueError(
                        f"KVCache: {count} tokens after {least} do not fit into a length of {size}; make a longer cache"
                    )
                return least, least + count
            return self.length + torch.arange(count, device=self.length.device), self.length + count
        if positions.dtype != torch.int64 or tuple(positions.shape) != (count,):
            raise ValueError(
                f"KVCache: positions must be int64 of shape ({count},), got {positions.dtype} of "
                f"{tuple(positions.shape)}; give one for each token"
            )
        if known and count:
            low, high = (int(positions), int(positions)) if count == 1 else map(int, positions.aminmax())
            if low < 0 or high >= size:
                raise ValueError(
                    f"KVCache: positions must be from 0 to {size - 1}, got {positions}; make a longer cache"
                )
            if count == 1:
                return low, max(int(self.length), low + 1)
        return positions, torch.maximum(self.length, positions.amax() + 1) if count else self.length


def _check(name: str, q: Any) -> None:
    if not isinstance(q, Quantizer):
        raise TypeError(f"KVCache: {name} must be a Quantizer, got {shown(q)}; give one such as hop.presets.INT8_ROW")
    whole = any(blocks.per_dimension(block, 4)[:3] != (1, 1, 1) for _, block in q.stored().values())
    if q.flat or q.layout is not None or q.is_random() or q.format.is_codebook or q.scale.missing() or whole:
        raise ValueError(
            f"KVCache: {name} must quantize each token by itself, in the plain form, with scales that its rule finds, "
            f"to integers or floats; got {q}; give one such as hop.presets.INT8_ROW, INT4_32 or FP8_ROW"
        )


def _bytes(t: Tensor) -> Tensor:
    """t, or its bytes where it is of 8-bit floats, which some operators lack."""
    return t.view(torch.uint8) if t.is_floating_point() and t.itemsize == 1 else t
