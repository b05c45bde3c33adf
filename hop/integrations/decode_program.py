"""The program of a decode step: one token per sequence, at any position, updating keys and values in place.

Everything that depends on the position is an input: the slots to write, and the visible slots.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hop.compat.export import WithoutGradModes
from hop.integrations.cache import HopCache, SlidingLayer
from hop.nn.attention.kv_cache import KVCache
from hop.tensor import QuantizedTensor

Inputs = tuple[Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]]
"""Tokens, positions, slots and masks, as Step.forward takes them."""
FULL, WINDOW = "full_attention", "sliding_attention"
"""Transformers' names of the kinds of layers."""


class Step(nn.Module):
    """A model with the caches of its layers, as a module to export.

    Args:
        model: a transformers model with a head.
        cache: a HopCache whose buffers exist.
    """

    def __init__(self, model: Any, cache: HopCache) -> None:
        super().__init__()
        layers: Any = cache.layers
        self.model, self.caches = model, nn.ModuleList([layer.cache for layer in layers])
        self.kinds = [WINDOW if isinstance(layer, SlidingLayer) else FULL for layer in layers]
        sizes: dict[str, set[int]] = {}
        for kind, layer in zip(self.kinds, layers, strict=True):
            sizes.setdefault(kind, set()).add(layer.length)
        if any(len(several) > 1 for several in sizes.values()):
            raise ValueError(
                f"compile_decode: layers of {type(model).__name__} attend to windows of {sorted(sizes[WINDOW])} "
                "tokens, and a step has one window; run the model in eager mode"
            )
        self.sizes: dict[str, int] = {kind: next(iter(sizes[kind])) for kind in sorted(sizes)}
        self.by_kind = (
            getattr(cache.config, "layer_types", None) is not None
        )  # whether the model expects one mask per kind

    def forward(self, tokens: Tensor, positions: Tensor, slots: Sequence[Tensor], seen: Sequence[Tensor]) -> Tensor:
        """The logits of one token per sequence.

        Args:
            tokens: int64 (batch, 1).
            positions: int64 (batch, 1), counting the tokens of a sequence without padding.
            slots: int64 (1,) per kind in the order of `sizes`: where to write keys and values.
            seen: bool (batch, 1, 1, count) per kind in the order of `sizes`: the visible slots.

        Returns:
            (batch, vocabulary).
        """
        given = {kind: (slot, mask.shape[-1]) for kind, slot, mask in zip(self.sizes, slots, seen, strict=True)}
        mask = dict(zip(self.sizes, seen, strict=True)) if self.by_kind else seen[0]
        with WithoutGradModes():
            outputs = self.model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=Slots(self.caches, [given[kind] for kind in self.kinds]),
                use_cache=True,
            )
        return outputs.logits[:, -1]


class Slots(Cache):
    """A stand-in for the cache that writes to the given slots.

    Args:
        caches: a KVCache per layer.
        given: the slot of each, and the number of visible slots.
        alone: whether there is one cache, for whichever layer calls.
    """

    def __init__(self, caches: Any, given: list[tuple[Tensor, int]], alone: bool = False) -> None:
        super().__init__(layers=[])
        self.caches, self.given, self.alone = caches, given, alone

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object) -> Any:
        index = 0 if self.alone else layer_idx
        kv: KVCache = self.caches[index]
        return kv.put(key_states, value_states, *self.given[index])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise NotImplementedError("the model asks for the length of the cache, which a program of all lengths has not")


def examples(step: Step, batch: int, most: int, less: int = 0) -> tuple[Inputs, list[Any]]:
    """Inputs of a step, `less` visible slots fewer where that leaves two, and the dynamic dimensions of each mask."""
    counts = {kind: min(size, most) for kind, size in step.sizes.items()}
    free = {k: torch.export.Dim(k.split("_")[0], min=2, max=n) if n > 2 else None for k, n in counts.items()}
    one, zero = torch.zeros(batch, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    masks = [torch.ones(batch, 1, 1, max(2, (n + 2) // 2 - less), dtype=torch.bool) for n in counts.values()]
    inputs = (one, one.clone(), [zero.clone() for _ in masks], masks)
    return inputs, [{3: d} if d else None for d in free.values()]


class NumberIsUsed(Exception):
    """A layer computes with its number, so that layers do not share a program."""


@contextmanager
def traceable(model: object) -> Iterator[None]:
    """Raise errors of tracing a model, except NumberIsUsed, as ValueErrors that name it."""
    try:
        yield
    except NumberIsUsed:
        raise
    except Exception as error:
        raise ValueError(
            f"compile_decode: {type(model).__name__} cannot be traced as one program for all positions: {error}"
        ) from error


def share_codes(graph: torch.fx.Graph) -> None:
    """Quantize an input only once if several layers read it, such as query, key and value."""
    quantize, known = torch.ops.hop_native.quantize.default, dict[Any, Any]()
    for node in list(graph.nodes):
        if node.target is quantize and not node.kwargs:
            first = known.setdefault(node.args, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def tensors_of(step: nn.Module) -> dict[str, Tensor]:
    """The tensors that a program may read of a module, by the names that export gives, including parts of quantized
    parameters.
    """
    tensors: dict[str, Tensor] = {}
    for pairs in (step.named_parameters(remove_duplicate=False), step.named_buffers(remove_duplicate=False)):
        for name, tensor in pairs:
            if isinstance(tensor, QuantizedTensor):
                path, _, leaf = name.rpartition(".")
                prefix = f"{path}.parametrizations.{leaf}.original"
                tensors |= {f"{prefix}{i}": part for i, part in enumerate(_parts(tensor))}
            else:
                tensors[name] = tensor
    return tensors


def _parts(tensor: Any) -> list[Tensor]:
    """The plain tensors inside a wrapper subclass."""
    names, _ = tensor.__tensor_flatten__()
    inner = [getattr(tensor, name) for name in names]
    return [part for t in inner for part in (_parts(t) if hasattr(t, "__tensor_flatten__") else [t])]
