"""KVCache: keys and values of past tokens, as codes and scales in buffers of fixed shape."""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from hop.compat import eager
from hop.compat.pytree import StateDict
from hop.impls.quantize import row_buffers
from hop.nn.attention.attending import attend, prepared, rotated_size
from hop.nn.scales.static import Float32State
from hop.numerics import blocks, copies, presets
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import shown
from hop.tensor import QuantizedTensor

_TOKENS = 2  # the dimension of tokens
_STEP = 64  # `extend` returns a multiple of this number of slots, so that views and plans serve several tokens


class _Views:
    """The key and value that `extend` returned last, and the buffers of which they are views.

    Copies of a cache start without any.
    """

    def __init__(self) -> None:
        self.form: tuple[int, bool] = (0, False)  # the number of slots; whether they are inference tensors
        self.buffers: list[Tensor] = []
        self.tensors: tuple[QuantizedTensor, QuantizedTensor] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return _Views, ()


class KVCache(Float32State):
    """A quantized key-value cache of shape (batch, heads, length, head_dim), filled from its first token on.

    Each token is quantized once, when it is appended, independently of the others. The buffers are those of
    `quantizer`, named `key_codes`, `key_scale`, ..., `value_codes`, ..., and `length`, int64 of shape (): the number of
    tokens so far. All have fixed shapes and change in place, so a compiled or exported program does not change as the
    cache fills. Unused entries have a scale of 0. Gradients do not flow through the cache.

    Args:
        shape: (batch, heads, length, head_dim) of the keys.
        quantizer: the quantizer of the keys: integers or floats, with scales that belong to one token or part of one:
            hop.presets.INT8_ROW, INT4_32, FP8_ROW, MXFP8, ...
        value_quantizer: the quantizer of the values; None for the same.
        value_dim: the width of the values; None for head_dim.
        rotated: whether keys are transformed before they are quantized, as for an AttentionScheme with rotated=True.
            Queries must be transformed too, which `forward` does. The state_dict then contains `rotation`, the number
            of elements that are transformed together.
        dtype: the floating-point dtype the keys and values appear in.
        device: the device of the buffers.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a token's codes would depend on other tokens or on a scale from the caller, or keys and values are
            not both integers or both floats.
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
            raise TypeError(f"KVCache: dtype must be floating point, got {dtype!r}; use one such as torch.bfloat16")
        values = quantizer if value_quantizer is None else value_quantizer
        _check("quantizer", quantizer)
        _check("value_quantizer", values)
        if quantizer.format.is_integer != values.format.is_integer:
            raise ValueError(
                f"KVCache: quantizer and value_quantizer must both have integer formats, or both float formats, as "
                f"attention takes them; got {quantizer} and {values}"
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
        self._views = _Views()
        self.register_buffer("length", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("rotation", torch.tensor(rotated_size(sizes[-1]), device=device) if rotated else None)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, head_dim) of the keys."""
        batch, heads, length = self.key_codes.shape[:3]
        return batch, heads, length, self.widths["key"]

    @property
    def key(self) -> QuantizedTensor:
        """All keys as a view of the buffers, including unused entries; rotated ones in a rotated cache."""
        return self._tensor("key", {name: getattr(self, f"key_{name}") for name in self.parts["key"]})

    @property
    def value(self) -> QuantizedTensor:
        """All values as a view of the buffers, including unused entries."""
        return self._tensor("value", {name: getattr(self, f"value_{name}") for name in self.parts["value"]})

    @torch.no_grad()
    def append(
        self, key: Tensor, value: Tensor, positions: Tensor | None = None
    ) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Quantize the keys and values of more tokens, and write them at their positions.

        Args:
            key: (batch, heads, T, head_dim), floating point.
            value: (batch, heads, T, value_dim).
            positions: int64 (T,), each at least 0 and less than `length`, without gaps before them; None for the next
                positions.

        Returns:
            All keys and all values, like the attributes `key` and `value`.

        Raises:
            ValueError: a shape does not fit; or, in eager mode on the CPU, a position is out of range.
        """
        new = self._quantized(key, value)
        return self._written(new, *self._places(key.shape[_TOKENS], positions))

    @torch.no_grad()
    def slide(self, key: Tensor, value: Tensor, size: int | None = None) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Append to a sliding window of the last `size` tokens, None for the cache's length.

        The token at position p is stored in slot p modulo size.

        Returns:
            Keys and values of the stored and the new tokens, (batch, heads, size + T, ...), in order. If the window was
            not full, the last entries are unused.

        Raises:
            ValueError: a shape does not fit; or size exceeds the length.
        """
        new, device, count = self._quantized(key, value), self.length.device, key.shape[_TOKENS]
        size = self.shape[_TOKENS] if size is None else size
        if not 0 <= size <= self.shape[_TOKENS]:
            raise ValueError(f"KVCache: size must be from 0 to the cache's length, {self.shape[_TOKENS]}, got {size}")
        if self._is_known() and (at := int(self.length)) + count <= size and size + count <= self.shape[_TOKENS]:
            self._write(new, at)  # the window has room: no token moves
            self.length.fill_(at + count)
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
                buffer, t_bytes = _bytes(getattr(self, f"{of}_{name}")), _bytes(t)
                both = torch.cat([buffer.index_select(_TOKENS, order), t_bytes], _TOKENS)
                slid[name] = both.index_copy_(_TOKENS, places, t_bytes).view(t.dtype)
                buffer.index_copy_(_TOKENS, slots, t_bytes.narrow(_TOKENS, count - last, last))
            whole[of] = self._tensor(of, slid)
        self.length.add_(count)
        return whole["key"], whole["value"]

    def extend(self, key: Tensor, value: Tensor, size: int | None = None) -> tuple[QuantizedTensor, QuantizedTensor]:
        """`append`, or `slide` by a window of `size` tokens, without the slots behind the last token where possible.

        In eager mode on the CPU, while no token leaves the window, it returns views of the first slots: the tokens so
        far, rounded up to a multiple of 64. Attention then takes the time of these, not of all slots.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.extend(key, value, size)
        count, slots = key.shape[_TOKENS] if key.dim() == 4 else 0, self.key_codes.shape[_TOKENS]
        end = int(self.length) + count if self._is_known() else slots + 1
        if end > (slots if size is None else min(size, slots)):
            return self.append(key, value) if size is None else self.slide(key, value, size)
        self._write(self._quantized(key, value), end - count)
        self.length.fill_(end)
        return self._used(min(-(-end // _STEP) * _STEP, slots))

    def _used(self, count: int) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Keys and values of the first `count` slots, as views; the same tensors while nothing has changed."""
        views, form = self._views, (count, torch.is_inference_mode_enabled())
        buffers: list[Tensor] = [getattr(self, name) for name in self._names()]
        if views.tensors is None or views.form != form or any(map(operator.is_not, views.buffers, buffers)):
            key, value = ({name: self._first(of, name, count) for name in self.parts[of]} for of in self.parts)
            views.tensors = self._tensor("key", key), self._tensor("value", value)
            views.form, views.buffers = form, buffers
        return views.tensors

    @torch.no_grad()
    def put(self, key: Tensor, value: Tensor, slots: Tensor, count: int) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Quantize tokens and write them to slots that the caller chooses, without changing `length`.

        For programs whose caller counts tokens, and reads only the slots in use.

        Args:
            key, value: as for append.
            slots: int64 (T,), each less than the cache's length.
            count: the number of slots to return.

        Returns:
            Keys and values of the first `count` slots, as views of the buffers.
        """
        whole: dict[str, QuantizedTensor] = {}
        for of, buffers in self._quantized(key, value).items():
            written: dict[str, Tensor] = {}
            for name, t in buffers.items():
                buffer = getattr(self, f"{of}_{name}")
                _bytes(buffer).index_copy_(_TOKENS, slots, _bytes(t))
                written[name] = buffer.narrow(_TOKENS, 0, count)
            whole[of] = self._tensor(of, written)
        return whole["key"], whole["value"]

    def mask(self, positions: Tensor, window: int | None = None) -> Tensor:
        """The causal mask, bool (T, length): True up to each query's own position, int64 (T,).

        With a window, only for the last `window` tokens of these.
        """
        slots, queries = torch.arange(self.shape[_TOKENS], device=positions.device), positions.unsqueeze(-1)
        seen = slots <= queries
        return seen if window is None else seen & (slots > queries - window)

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
        """Append tokens, and let each attend to all tokens up to itself.

        Args:
            query: (batch, query heads, T, head_dim); the number of query heads is a multiple of the cache's heads.
            key, value, positions: as for append.
            mask: bool, broadcastable to (batch, heads, T, length): False hides further entries, such as padding.
            scale: the factor of the scores, None for 1 / sqrt(head_dim).

        Returns:
            (batch, query heads, T, value_dim), in the dtype of query.
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
        """Remove the tokens from position `length` on."""
        self.length.clamp_(max=length)
        gone = torch.arange(self.shape[_TOKENS], device=self.length.device) >= self.length
        for name in self._names():
            getattr(self, name).view(torch.uint8).masked_fill_(gone.unsqueeze(-1), 0)

    @torch.no_grad()
    def select(self, indices: Tensor) -> None:
        """Reorder the batch: sequence i becomes the one at indices[i] (int64). In place if the batch size stays the
        same.
        """
        for name in self._names():
            buffer: Tensor = getattr(self, name)
            selected = buffer.index_select(0, indices.to(buffer.device))
            if selected.shape == buffer.shape:
                buffer.copy_(selected)
            else:
                setattr(self, name, selected)

    def reset(self) -> None:
        """Remove all tokens."""
        self.crop(0)

    def extra_repr(self) -> str:
        of = self.quantizers
        values = "" if of["value"] == of["key"] else f", values={of['value']}"
        rotated = ", rotated=True" if self.rotated else ""
        return f"shape={self.shape}, {of['key']}{values}, dtype={self.dtype}{rotated}"

    def _load_from_state_dict(
        self,
        state_dict: StateDict,
        prefix: str,
        local_metadata: object,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        is_rotated = f"{prefix}rotation" in state_dict
        if is_rotated != self.rotated and f"{prefix}key_codes" in state_dict:  # also with strict=False
            error_msgs.append(
                f"KVCache: {prefix}key_codes are {'' if is_rotated else 'not '}rotated, but this cache has rotated="
                f"{self.rotated}; make one with rotated={is_rotated}"
            )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    # ---- helpers

    def _names(self) -> list[str]:
        """The names of all buffers with codes, scales and zero points."""
        return [f"{of}_{name}" for of, names in self.parts.items() for name in names]

    def _tensor(self, of: str, buffers: dict[str, Tensor]) -> QuantizedTensor:
        q, codes = self.quantizers[of], buffers["codes"]
        shape = (*codes.shape[:3], self.widths[of])
        if torch.compiler.is_compiling():  # Dynamo can trace the constructor
            return QuantizedTensor(buffers, q, shape, self.dtype)
        if codes.is_cpu and q.per_byte() == 1 and codes.is_contiguous() and eager.is_plain_eager():
            return QuantizedTensor.fresh(tuple(buffers), tuple(buffers.values()), q, shape, self.dtype)
        return QuantizedTensor.fitting(buffers, q, shape, self.dtype)

    def _first(self, of: str, name: str, count: int) -> Tensor:
        """The first `count` tokens of a buffer."""
        buffer: Tensor = getattr(self, f"{of}_{name}")
        return buffer if buffer.shape[_TOKENS] == count else buffer.narrow(_TOKENS, 0, count)

    def _is_known(self) -> bool:
        """Whether reading the length as an int needs no synchronization or tracing."""
        return not torch.compiler.is_compiling() and eager.is_plain_eager() and self.length.is_cpu

    def _written(
        self, new: dict[str, dict[str, Tensor]], places: Tensor | int, length: Tensor | int
    ) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Write new tokens, and return all keys and values."""
        self._write(new, places)
        if isinstance(length, int):
            self.length.fill_(length)
        else:
            self.length.copy_(length)
        return self.key, self.value

    def _write(self, new: dict[str, dict[str, Tensor]], places: Tensor | int) -> None:
        for of, buffers in new.items():
            for name, t in buffers.items():
                stored: Tensor = getattr(self, f"{of}_{name}")
                if isinstance(places, int):  # twice as fast as a copy by index
                    stored.narrow(_TOKENS, places, t.shape[_TOKENS]).copy_(t)
                else:
                    _bytes(stored).index_copy_(_TOKENS, places, _bytes(t))

    def _quantized(self, key: Tensor, value: Tensor) -> dict[str, dict[str, Tensor]]:
        """The buffers of new tokens."""
        result: dict[str, dict[str, Tensor]] = {}
        batch, heads = self.key_codes.shape[:2]
        known = self._is_known() and eager.is_unwatched() and not eager.is_dual_level_open()
        for of, x in (("key", key), ("value", value)):
            self._check_new(of, x, key, batch, heads)
            q, rotates = self.quantizers[of], self.rotated and of == "key"
            found = row_buffers(q, x) if known and not rotates and type(x) is Tensor else None
            if found is None:
                t = prepared(q, x.detach(), rotates)
                found = [getattr(t, name) for name in self.parts[of]]
            result[of] = dict(zip(self.parts[of], found, strict=True))
        return result

    def _check_new(self, of: str, x: object, key: Tensor, batch: int, heads: int) -> None:
        if not isinstance(x, Tensor) or isinstance(x, QuantizedTensor):
            raise TypeError(
                f"KVCache: {of} must be a plain tensor, got {shown(x)}; pass floats, which the cache quantizes"
            )
        count = key.shape[_TOKENS] if key.dim() == 4 else None
        if x.dim() != 4 or tuple(x.shape) != (batch, heads, count, self.widths[of]):
            raise ValueError(
                f"KVCache: {of} must be (batch, heads, tokens, width) = ({batch}, {heads}, T, {self.widths[of]}), with "
                f"one T for keys and values, got {tuple(x.shape)}; make a cache of this shape"
            )

    def _places(self, count: int, positions: Tensor | None) -> tuple[Tensor | int, Tensor | int]:
        """The positions of `count` tokens, and the length after them.

        As ints (the first position, and the length) if these are known on the host and the tokens are consecutive.
        """
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


def _check(name: str, q: object) -> None:
    if not isinstance(q, Quantizer):
        raise TypeError(f"KVCache: {name} must be a Quantizer, got {shown(q)}; give one such as hop.presets.INT8_ROW")
    whole = any(blocks.per_dimension(block, 4)[:3] != (1, 1, 1) for _, block in q.stored().values())
    if q.flat or q.layout is not None or q.is_random() or q.format.is_codebook or q.scale.missing() or whole:
        raise ValueError(
            f"KVCache: {name} must quantize each token by itself, in the plain form, with scales found by its rule, "
            f"to integers or floats; got {q}; give one such as hop.presets.INT8_ROW, INT4_32 or FP8_ROW"
        )


def _bytes(t: Tensor) -> Tensor:
    """t, or its bytes if it has an 8-bit float dtype, for which some operators are missing."""
    return t.view(torch.uint8) if t.is_floating_point() and t.itemsize == 1 else t
