"""Linear and Embedding in low precision."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from hop.compat.eager import OpOverload, ignored, is_unwatched, past_ignored_modes
from hop.compat.pytree import Args, StateDict
from hop.impls.quantize import quantize
from hop.impls.quantized import Scales
from hop.impls.quantized.contract import Options
from hop.impls.quantized.linear import linear
from hop.impls.scaled import scaled
from hop.nn.contexts import INPUT, OUTPUT, WEIGHT, SchemeNeeds, active
from hop.nn.layers.base import Layer
from hop.nn.layers.sources import Source
from hop.nn.scales.transforms import InputTransform
from hop.nn.weights.recomputed import recomputed, remedied
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme

aten = torch.ops.aten

# A module's global names are found faster than attributes.
_is_unwatched, _is_grad_enabled, _is_compiling = is_unwatched, torch.is_grad_enabled, torch.compiler.is_compiling
_linear = aten.linear.default


class Linear(Layer, nn.Linear):
    """torch.nn.Linear in low precision.

    The backward reads the codes that the forward saved, and saves only what gradients need; see docs/training.md.

    If the weight has an attribute `main_grad`, a floating-point tensor of its shape, the weight's gradient is added to
    it instead of to `weight.grad`.

    If the layer has an `input_order`, int64 (in_features,), column i of the weight belongs to input feature
    input_order[i]. The input is gathered in this order before the product, so that the weight's groups are contiguous.
    `to_float` restores the original column order.

    Args:
        args, kwargs: those of torch.nn.Linear.
        scheme: the quantizers of the product, and how its gradient is computed.
        learn_scales: whether static scales (quantizers with the rule Static) are Parameters.
        save_original: whether the forward saves the float input and weight, and the backward quantizes them again.
            Takes
            memory for the input unless it is alive anyway; the gradient is then differentiable.

    Raises:
        ValueError: the operator cannot run in this scheme.
    """

    float_type = nn.Linear
    input_order: Tensor | None
    example_dims = 1
    added = (*Layer.added, "save_original", "holds", "_held", "input_transform")
    input_transform: InputTransform | None

    def __init__(
        self,
        *args: object,
        scheme: Scheme,
        learn_scales: bool = False,
        save_original: bool = False,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, scheme=scheme, learn_scales=learn_scales, **kwargs)
        self.save_original = save_original

    def _begin(self, scheme: Scheme, learn_scales: bool) -> None:
        self.save_original, self.holds, self.input_transform = False, False, None
        self._held: tuple[Scheme | None, list[Tensor]] = (None, [])
        self.register_buffer("input_order", None)
        super()._begin(scheme, learn_scales)

    def forward(self, input: Tensor) -> Tensor:
        if self.frozen and not (_is_grad_enabled() or _is_compiling()) and _is_unwatched():
            if self._buffers["input_order"] is not None or self.input_transform is not None:
                input = self.transformed(input)
            return past_ignored_modes(self._multiplied, input) if ignored.modes else self._multiplied(input)
        return self._compute(self.transformed(input))

    def _multiplied(self, x: Tensor) -> Tensor:
        """Short form of `_compute` for frozen layers, when no mode, hook or gradient observes the call."""
        needs, parameters = active(self._own), self._parameters
        weight, scheme = parameters.get(WEIGHT), needs.settled
        if (
            scheme is None
            or weight is None
            or scheme.output is not None
            or needs.needs
            or self._norms
            or self.in_floats
        ):
            return self._compute(x)
        q = scheme.lhs
        if type(x) is not Tensor:
            if q is None or getattr(x, "quantizer", None) != q:
                return self._compute(x)
        elif q is not None:
            codes = self._codes_of(q, x)
            x = quantize(q, x) if codes is x else codes
        if x.dtype != weight.dtype:
            return self._compute(x)
        return scaled(_linear, x.dtype, x, weight, parameters["bias"])

    def _codes_of(self, q: Quantizer, x: Tensor) -> Tensor:
        """x as a QuantizedTensor if its producer or a sibling layer quantizes it, else x."""
        codes, shared = Source.codes(q, x), self.shared_input
        return codes if codes is not None else x if shared is None else shared.codes(self, q, x)

    def transformed(self, x: Tensor) -> Tensor:
        """The input after reordering and InputTransform, as it is quantized."""
        x = x if self.input_order is None else x.index_select(-1, self.input_order)
        return x if self.input_transform is None else self.input_transform(x)

    def to_float(self) -> nn.Module:
        result = super().to_float()
        result._buffers.pop("input_order", None)
        return result

    def transform_input(self, transform: InputTransform) -> None:
        """Apply a transform to the input and its inverse to the weight from now on.

        The result is the same except for rounding. A static scale of the input has to be calibrated again.

        Raises:
            ValueError: the layer is frozen or recomputes its weight, its existing transform cannot be followed by this
                one, or the number of channels does not match.
        """
        factor = transform.factor
        if self.frozen:
            raise ValueError("hop.nn.Linear: weight is frozen and cannot be transformed; transform before freezing")
        for each in recomputed(self):
            raise ValueError(f"hop.nn.Linear: {remedied(each)}")
        if factor is not None and factor.shape != (self.in_features,):
            raise ValueError(
                f"hop.nn.Linear: the factor must have the shape {(self.in_features,)}, got {tuple(factor.shape)}; give "
                "one number for each channel of the input"
            )
        block = 1 if transform.hadamard is None else len(transform.hadamard.signs)
        if self.in_features % block:
            raise ValueError(
                f"hop.nn.Linear: in_features={self.in_features} must be a multiple of the {block} channels that are "
                "transformed together; take fewer"
            )
        self.input_transform = transform.after(self.input_transform)
        with torch.no_grad():
            self.weight.copy_(transform.of_weight(self.weight.detach()))
        self.forget_scales((INPUT, WEIGHT))

    def float_weight(self, weight: Tensor) -> Tensor:
        """The float layer's weight for `weight`: without the input transform and the input order."""
        weight = weight if self.input_transform is None else self.input_transform.undone(weight)
        return weight if self.input_order is None else weight.index_select(1, self.input_order.argsort())

    def _load_from_state_dict(
        self, state_dict: StateDict, prefix: str, local_metadata: Mapping[str, object], *args: object, **kwargs: object
    ) -> None:
        order = state_dict.get(f"{prefix}input_order")
        if order is not None and self.input_order is None:
            self.input_order = torch.empty_like(order, device=self._device)
        transform_prefix = f"{prefix}input_transform."
        state = {
            key.removeprefix(transform_prefix): value
            for key, value in state_dict.items()
            if key.startswith(transform_prefix)
        }
        if (loaded := InputTransform.loaded(state)) is not None:  # a checkpoint's weight is for its transform
            self.input_transform = loaded if self.weight.is_meta else loaded.to(self.weight.device)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)

    def hold_weight(self, holds: bool) -> None:
        """Keep the weight's codes from the next call on (True), or drop them (False)."""
        self.holds, self._held = holds, (None, [])

    def _run(self, op: OpOverload, scheme: Scheme, args: Args, scales: Scales) -> Tensor:
        if self.frozen:  # no gradient of the weight, so nothing to save
            x, *others = args
            q = scheme.lhs
            if q is not None and q.scale.missing() is None and not torch.compiler.is_compiling():
                x = self._codes_of(q, x)
            return super()._run(op, scheme, (x, *others), scales)
        # the multiplied weight is a new tensor; its gradient flows on to the Parameter
        if self.norm is not None or scheme.adds_noise():
            if getattr(self.weight, "main_grad", None) is not None:
                raise RuntimeError(
                    "hop.nn.Linear: main_grad would get the gradient of the tensor that is multiplied, the weight with "
                    f"its {'noise' if self.norm is None else 'batch norm folded in'}; leave main_grad out"
                )
            return super()._run(op, scheme, args, scales)
        of, held = self._held
        y, kept = linear(
            scheme,
            *args,
            scales=scales,
            options=Options(self.save_original, self.holds),
            main_grad=getattr(self.weight, "main_grad", None),
            held=held if of == scheme else (),
        )
        if kept:
            self._held = (scheme, kept)
        return y

    def _call(self, x: Tensor) -> tuple[OpOverload, Args]:
        return aten.linear.default, (x, self.weight, self.bias)

    def _sample(self) -> Tensor:
        return self._empty(1, self.in_features)

    def _output_shape(self, one: Sequence[int]) -> Sequence[int]:
        return (*one[:-1], self.out_features)


class Embedding(Layer, nn.Embedding):
    """torch.nn.Embedding with quantized rows. Arguments and errors as for Linear.

    If the scheme leaves weights in floats, so does the layer. Its gradient is dense: sparse=True raises ValueError.
    """

    float_type = nn.Embedding
    is_packable = False
    reads_packed = True
    example_dims = 0
    roles = (WEIGHT, OUTPUT)

    def forward(self, input: Tensor) -> Tensor:
        if self.max_norm is not None:
            if self.frozen:
                raise RuntimeError("hop.nn.Embedding: max_norm would change rows of the frozen weight; set it to None")
            with torch.no_grad():
                torch.embedding_renorm_(self.weight, input.contiguous(), self.max_norm, self.norm_type)
        return self._compute(input)

    def _call(self, x: Tensor) -> tuple[OpOverload, Args]:
        padding = -1 if self.padding_idx is None else self.padding_idx
        return aten.embedding.default, (self.weight, x, padding, self.scale_grad_by_freq)

    def _sample(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int64, device=self.weight.device)

    def _output_shape(self, one: Sequence[int]) -> Sequence[int]:
        return (*one, self.embedding_dim)

    def _computes_floats(self, plan: SchemeNeeds) -> bool:
        return super()._computes_floats(plan) or not plan.quantizes_weight

    def _check(self, scheme: Scheme) -> None:
        if self.sparse:
            raise ValueError(
                "hop.nn.Embedding: sparse must be False, as sparse=True would need a sparse gradient; leave it out"
            )
        super()._check(scheme)


class ScaledEmbedding(Embedding):
    """An Embedding whose rows are multiplied by the buffer `embed_scale`, as in transformers' Gemma.

    Arguments and errors as for Embedding.
    """

    added = (*Embedding.added, "float_type")
    scaled: ClassVar[tuple[str, ...]] = (
        "transformers.models.gemma.modeling_gemma.GemmaTextScaledWordEmbedding",
        "transformers.models.gemma2.modeling_gemma2.Gemma2TextScaledWordEmbedding",
        "transformers.models.gemma3.modeling_gemma3.Gemma3TextScaledWordEmbedding",
    )
    embed_scale: Tensor
    scalar_embed_scale: float

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        return f"{type(module).__module__}.{type(module).__qualname__}" in cls.scaled

    @classmethod
    def from_float(cls, module: nn.Module, scheme: Scheme, learn_scales: bool = False) -> Self:
        result = super().from_float(module, scheme, learn_scales)
        result.float_type = type(module)
        return result

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embed_scale.to(self.weight.dtype)

    @torch.no_grad()
    def set_scale(self) -> None:
        """Fill the scale buffer, which checkpoints do not contain."""
        self.embed_scale.fill_(self.scalar_embed_scale)
