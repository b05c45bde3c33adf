"""HopCache: a transformers cache that stores keys and values as codes, in a hop.nn.KVCache per layer.

`update` returns QuantizedTensors. The attention "hop" reads their codes; any other implementation would dequantize them
and is rejected.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from hop.integrations.attention import IMPLEMENTATION, ROTATED, is_rotated
from hop.nn.attention.attending import own_scheme
from hop.nn.attention.kv_cache import KVCache
from hop.numerics import presets
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import shown
from hop.tensor import QuantizedTensor

MARK = "reads_codes"  # attribute of other attention functions that accept QuantizedTensors as key and value
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"  # the global through which a module's forward uses the interface


class QuantizedLayer(CacheLayerMixin):
    """The cache of a layer that attends to all tokens. KVCache's length is a tensor, so that compiled programs do not
    depend on it.

    Args:
        length: the most tokens that it can store.
        quantizer, value_quantizer, rotated: of the KVCache, which is created at the first update.
    """

    is_compileable = True
    is_croppable = True
    is_sliding = False
    spare = 0  # extra slots that never store a token

    def __init__(
        self, length: int, quantizer: Quantizer, value_quantizer: Quantizer | None = None, rotated: bool = False
    ) -> None:
        super().__init__()
        self.length, self.quantizer, self.value_quantizer, self.rotated = length, quantizer, value_quantizer, rotated
        self.cache: Any = None
        self.narrow = False  # whether the attention narrows its mask to the keys that `update` returns

    @property
    def batch_size(self) -> int:
        """The number of sequences; AttributeError before the first update, as transformers expects."""
        return self.cache.shape[0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Create the buffers. Compiled programs cannot do this: run the model once before, or call
        Cache.early_initialization.
        """
        batch, heads, _, width = key_states.shape
        self.cache = KVCache(
            (batch, heads, self.length + self.spare, width),
            self.quantizer,
            value_quantizer=self.value_quantizer,
            value_dim=value_states.shape[-1],
            dtype=key_states.dtype,
            device=key_states.device,
            rotated=self.rotated,
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Append new keys and values. Returns those of all slots, including empty ones; if `narrow`, those in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.write(key_states, value_states)

    def write(self, key: Tensor, value: Tensor) -> tuple[QuantizedTensor, QuantizedTensor]:
        """`update` after initialization."""
        return self.cache.extend(key, value) if self.narrow else self.cache.append(key, value)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys that update returns, and the position of the first."""
        return self.length, 0

    def get_seq_length(self) -> Any:
        """The number of tokens so far; a tensor in a compiled program, where it is not known."""
        return self._number(self.cache.length) if self.is_initialized else 0

    def get_max_length(self) -> int:
        """The most tokens that it can store."""
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens. A number above 0 raises ValueError, as in transformers."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"HopCache.crop: tokens_to_remove must be 0 or below, got {tokens_to_remove}; give -n to forget n"
            )
        if tokens_to_remove and self.is_initialized:
            self.cache.crop((self.cache.length + tokens_to_remove).clamp(min=0))

    def reset(self) -> None:
        """Forget all tokens."""
        if self.is_initialized:
            self.cache.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the sequences with those that beam_idx selects."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times, adjacently."""
        if self.is_initialized:
            indices = torch.arange(self.batch_size, device=self.cache.length.device)
            self.cache.select(indices.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Replace the sequences with those at `indices`."""
        if self.is_initialized:
            self.cache.select(indices)

    def offload(self) -> None:
        """Not supported: codes stay on the model's device."""
        raise NotImplementedError("HopCache: layers are not offloaded; leave offloading=False")

    prefetch = offload

    def _number(self, length: Tensor) -> Any:
        return length.clone() if torch.compiler.is_compiling() else int(length)


class SlidingLayer(QuantizedLayer):
    """The cache of a layer that attends to a window of tokens, including the current one.

    It stores a token at its position modulo the window. One more slot stays empty, so that a view of the used slots is
    never the whole buffer.

    Args:
        window: the number of tokens that the layer attends to.
        length, quantizer, value_quantizer, rotated: as for QuantizedLayer; it stores at most `length` tokens.
    """

    is_croppable = False
    is_sliding = True
    spare = 1

    def __init__(
        self,
        window: int,
        length: int,
        quantizer: Quantizer,
        value_quantizer: Quantizer | None = None,
        rotated: bool = False,
    ) -> None:
        super().__init__(min(window, length), quantizer, value_quantizer, rotated)
        self.window = window

    def write(self, key: Tensor, value: Tensor) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Append new keys and values. Returns those of the stored tokens and the new ones."""
        if self.narrow:
            return self.cache.extend(key, value, self.length)
        return self.cache.slide(key, value, self.length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """The number of keys that update returns, and the position of the first."""
        gone = (self.cache.length - self.length).clamp(min=0) if self.is_initialized else torch.tensor(0)
        return self.length + query_length, self._number(gone)

    def get_max_length(self) -> int:
        """The window."""
        return self.window

    def crop(self, tokens_to_remove: int) -> None:
        """Crop as QuantizedLayer does. Raises RuntimeError if a token has left the window."""
        if tokens_to_remove and self.is_initialized and int(self.cache.length) > self.length:
            raise RuntimeError(
                f"HopCache.crop: a layer has processed {int(self.cache.length)} tokens, and those before its window of "
                f"{self.window} are gone; start again from the prompt"
            )
        super().crop(tokens_to_remove)


_LAYERS = ("full_attention", "sliding_attention")


class HopCache(Cache):
    """A transformers cache with keys and values as codes; pass it as past_key_values.

    Args:
        model: a model whose attention is "hop" or "hop_rotated", and whose layers attend to all tokens or to a window.
            With "hop_rotated", keys are rotated before quantization (hop.attention_schemes.AttentionScheme).
        max_cache_len: the most tokens per sequence.
        quantizer: of keys, and of values without a value_quantizer; see hop.nn.KVCache.
        value_quantizer: of values.

    Raises:
        TypeError: model is not a transformers model.
        ValueError: an attention of the model would not read codes, a layer has another type, or the model is an
            encoder-decoder.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_cache_len: int,
        quantizer: Quantizer = presets.INT8_ROW,
        value_quantizer: Quantizer | None = None,
    ) -> None:
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"HopCache: model must be one of transformers, got {shown(model)}; give the model itself")
        if model.config.is_encoder_decoder:
            raise ValueError(
                f"HopCache: {type(model).__name__} has an encoder as well as a decoder, whose keys are cached "
                "differently; use transformers' own cache"
            )
        self.config: Any = model.config.get_text_config(decoder=True)
        _check_attention(self.config)
        self.rotated = is_rotated(self.config)
        _check_schemes(model)
        _check_modules(model)
        KVCache((1, 1, 1, 128), quantizer, value_quantizer=value_quantizer)  # raises for quantizers that do not fit
        types, options = get_layer_types_and_kwargs(self.config)
        others = sorted({name for name in types if name not in _LAYERS})
        if others:
            raise ValueError(
                f"HopCache: layers of {type(model).__name__} are of the types {others}, and it supports "
                f"{list(_LAYERS)}; use transformers' own cache"
            )
        layers: list[Any] = []
        for name, given in zip(types, options, strict=True):
            shared = (max_cache_len, quantizer, value_quantizer, self.rotated)
            is_window = name == "sliding_attention"
            layers.append(SlidingLayer(given["sliding_window"], *shared) if is_window else QuantizedLayer(*shared))
        super().__init__(layers=layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Append a layer's new keys and values. Returns those that its attention reads, as QuantizedTensors.

        Raises ValueError if the model's attention has changed to one that does not read codes, or not these keys.
        """
        name = _check_attention(self.config)
        if (name == ROTATED) != self.rotated:
            raise ValueError(
                f"HopCache: the cache holds keys {'that are' if self.rotated else 'that are not'} rotated, but the "
                f"model's attention is now {name!r}; create another cache"
            )
        layer: Any = self.layers[layer_idx]
        if layer.narrow != (narrow := name in (IMPLEMENTATION, ROTATED)):
            layer.narrow = narrow
        return layer.update(key_states, value_states, *args, **kwargs)


def _check_attention(config: Any) -> str:
    """The name of the model's attention. Raises ValueError if it would not read codes."""
    name = config._attn_implementation
    if name not in (IMPLEMENTATION, ROTATED) and not getattr(AttentionInterface().get(name), MARK, False):
        raise ValueError(
            f"HopCache: the model's attention is {name!r}, which would compute with floats; call "
            f"model.set_attn_implementation({IMPLEMENTATION!r}) after `import hop.integrations`, or quantize it with "
            "hop.quantize_(model, ..., attention=...)"
        )
    return name


def _check_schemes(model: nn.Module) -> None:
    """Raise ValueError if only some layers rotate, because a model has a single name of attention."""
    schemes = {name: scheme for name, m in model.named_modules() if (scheme := own_scheme(m)) is not None}
    if len({scheme.rotated for scheme in schemes.values()}) > 1:
        names = {rotated: next(n for n, s in schemes.items() if s.rotated is rotated) for rotated in (True, False)}
        raise ValueError(
            f"HopCache: the attention of {names[True]!r} rotates queries and keys, and that of {names[False]!r} does "
            "not; give all layers schemes with one `rotated`"
        )


def _check_modules(model: nn.Module) -> None:
    """Raise ValueError unless the modules that write to a cache use transformers' AttentionInterface."""
    known, others = False, set[str]()
    for module in model.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is None or "update" not in code.co_names or not any("past_key" in n for n in code.co_varnames):
            continue
        known, own = True, _REGISTRY in code.co_names
        others |= set() if own else {type(module).__name__}
    if others or not known:
        raise ValueError(
            f"HopCache: {sorted(others) or type(model).__name__} computes attention itself instead of through "
            "transformers' AttentionInterface, and would compute with floats; use transformers' own cache"
        )
