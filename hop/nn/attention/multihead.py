"""MultiheadAttention in low precision: its four projections, and optionally the attention between them (attending.py).

The Parameters are PyTorch's, under its names. InputProjection is a Linear layer without Parameters: it uses those of
the attention. So it can be calibrated, frozen and gathered like any other layer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from typing_extensions import Self

from hop.compat.eager import OpOverload
from hop.compat.pytree import Args, StateDict
from hop.impls.quantize import dequantize
from hop.nn.attention.attending import KINDS, Kind, attend, scheme_of, take
from hop.nn.attention.masks import merged
from hop.nn.contexts import WEIGHT
from hop.nn.layers.base import of_class
from hop.nn.layers.linear import Linear
from hop.numerics import blocks
from hop.numerics.layouts import Tiled
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme
from hop.tensor import QuantizedTensor

aten = torch.ops.aten


class OutputProjection(Linear):
    """The output Linear of an attention, for which PyTorch has a separate class."""

    float_type = NonDynamicallyQuantizableLinear


class InputProjection(Linear):
    """A product of an attention's input with one of its Parameters.

    Args:
        owner: the attention.
        weight_name: the name of the Parameter.
        part: the range of the in_proj_bias to use, in units of embed_dim rows: (first, end).
    """

    owner: nn.MultiheadAttention
    weight_name: str
    part: tuple[int, int]

    def __init__(
        self,
        owner: nn.MultiheadAttention,
        weight_name: str,
        part: tuple[int, int],
        scheme: Scheme,
        learn_scales: bool,
    ) -> None:
        nn.Module.__init__(self)
        # bypasses PyTorch's registration of submodules
        self.__dict__.update(owner=owner, weight_name=weight_name, part=part)
        self.out_features, self.in_features = self.weight.shape
        self._begin(scheme, learn_scales)
        self.train(owner.training)

    @property
    def weight(self) -> Tensor:
        return getattr(self.owner, self.weight_name)

    @property
    def bias(self) -> Tensor | None:
        bias, (start, stop), size = self.owner.in_proj_bias, self.part, self.owner.embed_dim
        return bias if bias is None or stop - start == 3 else bias[start * size : stop * size]

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        if name == WEIGHT:
            setattr(self.owner, self.weight_name, value)
        else:
            super().__setattr__(name, value)

    def __setstate__(self, state: Mapping[str, object]) -> None:
        nn.Module.__setstate__(self, state)  # the owner packs the weight, and may have no Parameters yet

    def weight_owner(self) -> tuple[nn.Module, str]:
        return self.owner, self.weight_name

    def forward(self, input: Tensor, rows: tuple[int, int] | None = None) -> Tensor:
        """The product with all rows of the weight, or with the rows from the first to before the second of `rows`."""
        return self._compute(input, rows)

    def _call(self, x: Tensor, rows: tuple[int, int] | None = None) -> tuple[OpOverload, Args]:
        weight, bias = self.weight, self.bias
        if rows is not None:
            weight, bias = _cut(weight, *rows), None if bias is None else bias[slice(*rows)]
        return aten.linear.default, (x, weight, bias)

    def cuts(self) -> bool:
        """Whether a product with some rows of the weight gives the same bits as these rows of the whole product."""
        weight, plan = self.weight, self.plan()
        if self._computes_floats(plan):
            return True
        assert plan.scheme is not None
        is_known = isinstance(weight, QuantizedTensor) or type(weight) in (Tensor, nn.Parameter)
        whole = self.holds or hasattr(weight, "main_grad") or plan.scheme.output is not None
        if whole or not is_known or (WEIGHT in self.scales and not self.frozen):
            return False
        q = weight.quantizer if isinstance(weight, QuantizedTensor) else plan.scheme.rhs
        return q is None or _has_rows(q, self.owner.embed_dim)


def _has_rows(q: Quantizer, count: int) -> bool:
    """Whether each range of `count` rows has separate codes and scales."""
    layout = q.layout
    fits = layout is None or (isinstance(layout, Tiled) and not layout.columns and count % layout.panel == 0)
    stored = q.stored().values()
    return fits and not q.flat and all(blocks.per_dimension(block, 2)[0] == 1 for _, block in stored)


def _cut(weight: Tensor, start: int, stop: int) -> Tensor:
    """Rows start to stop of a weight."""
    layout = weight.quantizer.layout if isinstance(weight, QuantizedTensor) else None
    if not isinstance(weight, QuantizedTensor) or not isinstance(layout, Tiled):
        return weight[start:stop]
    buffers = {name: b[start:stop] for name, b in weight.buffers().items()}
    buffers["codes"] = weight.buffers()["codes"][start // layout.panel : stop // layout.panel]
    return weight.rebuilt(buffers, shape=(stop - start, weight.shape[1]))


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention with low-precision projections.

    The attention between them is computed in floats, or in low precision with hop.quantize_(model, scheme,
    attention="int8"). The Parameters are PyTorch's, under its names. An input that is query, key and value at once is
    quantized and multiplied once. PyTorch's fused path, which reads float weights, is never used. Nested tensors raise
    TypeError.

    Args:
        args, kwargs: those of torch.nn.MultiheadAttention.
        scheme: the scheme of the projections.
        learn_scales: as for Linear.

    Raises:
        ValueError: the projections cannot run in this scheme.
    """

    def __init__(self, *args: Any, scheme: Scheme, learn_scales: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin(scheme, learn_scales)

    @classmethod
    def from_float(cls, module: nn.Module, scheme: Scheme, learn_scales: bool = False) -> Self:
        """Create a quantized attention with the Parameters, hooks and settings of `module`.

        Raises:
            TypeError: module is a subclass of torch.nn.MultiheadAttention, which may compute something else.
            ValueError: the projections cannot run in this scheme.
        """
        if type(module) is not nn.MultiheadAttention:
            raise TypeError(
                "MultiheadAttention.from_float: module must be a plain torch.nn.MultiheadAttention, whose forward is "
                f"known; got {type(module).__name__}"
            )
        result = of_class(cls, module)
        result._begin(scheme, learn_scales)
        return result

    def _begin(self, scheme: Scheme, learn_scales: bool) -> None:
        one = {"in_proj": (0, 3)}
        parts = one if self.in_proj_weight is not None else {"q_proj": (0, 1), "k_proj": (1, 2), "v_proj": (2, 3)}
        projections = {n: InputProjection(self, f"{n}_weight", part, scheme, learn_scales) for n, part in parts.items()}
        if type(self.out_proj) is OutputProjection.float_type:
            self.out_proj = OutputProjection.from_float(self.out_proj, scheme, learn_scales)
        for name, projection in projections.items():
            self.add_module(name, projection)

    def to_float(self) -> nn.Module:
        """The float attention, under the rules of Layer.to_float."""
        result = of_class(nn.MultiheadAttention, self)
        take(result, None)
        for projection in self.projections():
            result.__dict__["_modules"].pop(projection.weight_name.removesuffix("_weight"))
            if isinstance(projection.weight, QuantizedTensor):
                setattr(result, projection.weight_name, nn.Parameter(dequantize(projection.weight)))
        if isinstance(self.out_proj, Linear):
            result.add_module("out_proj", self.out_proj.to_float())
        return result

    def projections(self) -> list[InputProjection]:
        """The input projections: one for query, key and value together, or one for each."""
        return [m for m in self.children() if isinstance(m, InputProjection)]

    @property
    def scheme(self) -> Scheme:
        """The scheme of the input projections outside of `with hop.nn.scheme(...)`."""
        return self.projections()[0].scheme

    @scheme.setter
    def scheme(self, scheme: Scheme) -> None:
        for projection in self.projections():
            projection.scheme = scheme

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The names of the quantized Parameters."""
        return tuple(projection.weight_name for projection in self.projections())

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        for projection in self.__dict__.get("_modules", {}).values():
            if isinstance(projection, InputProjection) and projection.weight_name == name:
                projection.check_assigned(value)
        super().__setattr__(name, value)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute as torch.nn.MultiheadAttention does."""
        if any(x.is_nested for x in (query, key, value)):
            raise TypeError(
                "hop.nn.MultiheadAttention: query, key and value must not be nested tensors; pad them, and pass "
                "key_padding_mask"
            )
        if is_causal and attn_mask is None:
            raise ValueError(
                "hop.nn.MultiheadAttention: is_causal=True describes attn_mask as causal, but attn_mask is "
                "None; pass it too"
            )
        batched = query.dim() == 3
        q, k, v = (self._in_batches(x, batched) for x in self._projected(query, key, value))
        k, v, added = self._extended(k, v)
        hint = is_causal and key_padding_mask is None and not need_weights and not added
        masks = (None, None) if hint else (attn_mask, key_padding_mask)
        mask = merged(*masks, q, self.num_heads, k.shape[1] - added, added)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        chance = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if (scheme := scheme_of(self)) is not None:
            _check_whole(need_weights, chance)
            y = attend(scheme, q, k, v, mask, hint)
        elif need_weights:
            y, weights = _with_weights(q, k, v, mask, chance)
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            y = functional.scaled_dot_product_attention(q, k, v, mask, chance, hint)
        y = y.transpose(1, 2).flatten(-2)
        y = y.squeeze(0) if not batched else y if self.batch_first else y.transpose(0, 1)
        return self.out_proj(y), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values. Arguments that are the same tensor share one product."""
        first, *others = self.projections()
        if others:
            return [_floats(p(x)) for p, x in zip((first, *others), (query, key, value), strict=True)]
        if query is key and key is value:
            return _floats(first(query)).chunk(3, -1)
        size, cuts = self.embed_dim, first.cuts()
        result: list[Tensor] = []
        runs = [(query, 0, 2), (value, 2, 3)] if query is key else [(query, 0, 1), (key, 1, 2), (value, 2, 3)]
        runs = [(query, 0, 1), (key, 1, 3)] if key is value else runs
        for x, start, stop in runs:
            rows = (start * size, stop * size)
            y = _floats(first(x, rows) if cuts else first(x)[..., rows[0] : rows[1]])
            result += y.chunk(stop - start, -1)
        return result

    def _in_batches(self, x: Tensor, batched: bool) -> Tensor:
        """Bring x to the shape (N, L, E)."""
        if not batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Append learned bias keys and values, and zero attention. Returns keys, values and how many were added."""
        added, n = 0, k.shape[0]
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, b.to(x.dtype).expand(n, 1, -1)], 1) for x, b in ((k, self.bias_k), (v, self.bias_v)))
            added += 1
        if self.add_zero_attn:
            k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
            added += 1
        return k, v, added

    # ---- files, and moving to other devices

    def _save_to_state_dict(self, destination: StateDict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for projection in self.projections():
            projection.save_plain(destination, f"{prefix}{projection.weight_name}")

    def _load_from_state_dict(
        self, state_dict: StateDict, prefix: str, local_metadata: Mapping[str, object], *args: object, **kwargs: object
    ) -> None:
        assigns = bool(local_metadata.get("assign_to_params_buffers", False))
        for projection in self.projections():
            projection.prepare_loading(state_dict, f"{prefix}{projection.weight_name}", assigns)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        for projection in self.projections():
            projection.finish_loading(assigns)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        for projection in self.projections():
            projection.lay_out()
        return self

    def __setstate__(self, state: Mapping[str, object]) -> None:
        super().__setstate__(state)
        for projection in self.projections():
            projection.lay_out()


def _check_whole(need_weights: bool, chance: float) -> None:
    """Raise ValueError for options that attention in a scheme does not support."""
    if need_weights:
        raise ValueError(
            "hop.nn.MultiheadAttention: need_weights=True asks for all attention weights, which attention in a "
            "scheme does not keep; give need_weights=False, or convert with attention=None"
        )
    if chance > 0:
        raise ValueError(
            f"hop.nn.MultiheadAttention: dropout={chance} drops scores in training, but attention in a scheme drops "
            "none; set dropout=0, or call eval()"
        )


def _floats(y: Tensor) -> Tensor:
    return dequantize(y) if isinstance(y, QuantizedTensor) else y


def _with_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, chance: float) -> tuple[Tensor, Tensor]:
    """The attention's result, and its weights after dropout."""
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    weights = functional.dropout((scores if mask is None else scores + mask).softmax(-1), chance)
    return weights @ v, weights


def _declines(module: nn.Module) -> str | None:
    if isinstance(module, MultiheadAttention):
        return None
    return "its projections stay in floats, so PyTorch's own forward computes it; give them a scheme too"


KINDS.append(Kind(lambda module: isinstance(module, nn.MultiheadAttention), _declines, lambda module, scheme: None))
