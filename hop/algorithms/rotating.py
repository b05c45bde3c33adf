"""rotate: apply a Hadamard transform to blocks of channels of both operands of a product.

    x W^T = (x R) (W R)^T      R block-diagonal and orthogonal: diag(signs) · H / √n in each block

The transform spreads an outlier over its block, so that elements which share a scale have similar magnitudes. Ashkboos
et al. 2024, "QuaRot" (arXiv 2404.00456); for the format's block size, Egiazarian et al. 2025 (arXiv 2509.23202).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hop.algorithms.candidates import list_batches
from hop.algorithms.flow import FoldTarget
from hop.algorithms.stages import InputStatistics, Stages, error_function, trace_flow
from hop.nn.contexts import INPUT, WEIGHT
from hop.nn.layers.base import Layer, not_a_model
from hop.nn.layers.linear import Linear
from hop.nn.models.conversion import Rules, convert, settle_weights
from hop.nn.models.selectors import Selector
from hop.nn.scales.transforms import InputTransform
from hop.numerics.hadamard import SIGNS, SIZES, Hadamard, largest_size
from hop.numerics.schemes import Scheme


@dataclass(frozen=True)
class Rotation:
    """The settings of `rotate`.

    Args:
        size: number of channels to transform together. Default: the block of the activations' quantizer, or of the
            weight's if activations stay in floats: 32 in MX formats, 16 in NVFP4. If that is not in SIZES, as for whole
            rows, or does not divide the layer's channels, the largest of SIZES that divides them.
        seed: of the random signs; size 16 uses hop.numerics.hadamard.SIGNS instead.
        always: whether to rotate layers even if that does not reduce the error of their outputs on the data.

    Raises:
        ValueError: size is not in SIZES.
        TypeError: seed is not an integer, or always is not a bool.
    """

    size: int | None = None
    seed: int = 0
    always: bool = False

    def __post_init__(self) -> None:
        if self.size is not None and self.size not in SIZES:
            raise ValueError(f"Rotation: size must be one of {SIZES}, or None, got {self.size!r}; give such a size")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"Rotation: seed must be an integer, got {self.seed!r}; give 0")
        if not isinstance(self.always, bool):
            raise TypeError(f"Rotation: always must be True or False, got {self.always!r}; give one of them")

    def hadamard(self, scheme: Scheme, channels: int, head: int | None = None) -> Hadamard | None:
        """The transform for a layer with so many channels, in heads of `head` channels each if given; None if no size
        divides them.
        """
        q = scheme.lhs or scheme.rhs
        wanted = self.size or (q.block[-1] if q is not None else None)
        whole = channels if head is None else head
        if wanted not in SIZES or whole % wanted:
            if self.size is not None:
                return None
            wanted = largest_size(whole)
        if wanted is None:
            return None
        if wanted == len(SIGNS):
            return Hadamard()
        bits = torch.randint(2, (wanted,), generator=torch.Generator().manual_seed(self.seed))
        return Hadamard(tuple(int(2 * b - 1) for b in bits.tolist()))


@dataclass(frozen=True)
class RotatedLayer:
    """The rotation of one layer. Errors are those of the outputs on the sampled data, Σ|y - ŷ|² / Σ|y|², over all
    layers with the same input; NaN if the layer was skipped.
    """

    name: str
    size: int  # number of channels transformed together; 0 if not rotated
    before: float  # the error without the rotation
    after: float
    folded_into: str = ""  # the module whose weight was rotated instead; "" if the layer rotates its input itself
    note: str = ""  # why it is not rotated, or not folded


def rotate(
    model: nn.Module,
    rules: Rules,
    batches: Iterable[object],
    *,
    filter: Selector | None = None,
    settings: Rotation = Rotation(),
) -> Any:
    """Rotate the inputs of Linear layers by a block Hadamard matrix before quantization, and their weights by the
    inverse, in place.

    Layers are converted as by hop.nn.convert, and compute the same in floats up to rounding. Finish the model with
    `hop.quantize_` or `gptq` and the same rules.

        rotate(model, "mxfp4", batches)
        gptq(model, "mxfp4", batches)

    At the output projection of an attention, the value projection does the rotation, within each head and at no cost,
    if the exported graph shows that one leads to the other; likewise for linear layers with no function in between.
    Other layers transform their input in each call (`hop.nn.Linear.input_transform`).

    Args:
        model: the float model.
        rules, filter: as for `hop.quantize_`.
        batches: inputs, as for hop.nn.calibrate; kept in a list meanwhile.
        settings: the sizes, and whether to rotate always.

    Returns:
        The model. Its `rotation_report` has a RotatedLayer for each layer with a scheme, with a note if a layer is not
        rotated because that is no better, or because no batch reaches it, it shares its weight or it is not a Linear.

    Raises:
        TypeError, ValueError: as `smoothquant`.
    """
    if not isinstance(model, nn.Module):
        raise not_a_model("rotate", model)
    if not isinstance(settings, Rotation):
        raise TypeError(f"rotate: settings must be a Rotation, got {settings!r}; give Rotation()")
    data = list_batches("rotate", batches)
    settle_weights(model, rules, filter)
    flow = trace_flow(model, data[0])
    model = convert(model, rules, filter=filter)
    with torch.no_grad():
        rotating = _Rotating(model, data, flow, settings)
        rotating.run()
    model.rotation_report = tuple(rotating.rows.values())  # type: ignore[assignment]  # a plain attribute
    return model


class _Rotating(Stages):
    def __init__(self, model: nn.Module, data: Sequence[Any], flow: Any, settings: Rotation) -> None:
        super().__init__("rotate", "rotation", model, data, flow)
        self.settings = settings
        self.rows = {layer: RotatedLayer(name, 0, float("nan"), float("nan")) for layer, name in self.names.items()}

    def note(self, layer: Layer, note: str, **fields: object) -> None:
        self.rows[layer] = replace(self.rows[layer], note=note, **fields)

    def stage(self, layers: list[Linear], inputs: InputStatistics) -> None:
        """Rotate layers that share an input together if they share a scheme, else one by one."""
        if len({layer.scheme for layer in layers}) > 1:
            for layer in layers:
                self.stage([layer], inputs)
            return
        source, why = self._foldable(layers)
        channels = layers[0].in_features
        hadamard = self.settings.hadamard(layers[0].scheme, channels, None if source is None else source.head)
        if hadamard is None:
            for layer in layers:
                self.note(layer, f"no rotation: no allowed size divides its {channels} channels")
            return
        lost, x = error_function(layers, inputs), inputs.rows
        value_range = torch.stack([inputs.low.amin(), inputs.high.amax()])
        before = lost(x, lambda weight: weight, value_range)
        rotated = hadamard.apply(x)
        after = lost(rotated, hadamard.apply, rotated)
        for layer in layers:
            if not (after < before or self.settings.always):
                self.note(layer, "no rotation: it does not reduce the error", before=before, after=before)
                continue
            into, note = ("", f"not folded: {why}") if source is None else (source.name, "")
            fields = {"size": len(hadamard.signs), "before": before, "after": after, "folded_into": into}
            self.note(layer, note, **fields)
            if source is None:
                layer.transform_input(InputTransform(None, hadamard))
            else:
                layer.weight.copy_(hadamard.apply(layer.weight.detach()))
                layer.forget_scales((INPUT, WEIGHT))
        if source is not None and self.rows[layers[0]].size:
            self._fold(source, hadamard)

    def _foldable(self, layers: list[Linear]) -> tuple[FoldTarget | None, str]:
        """The linear layer whose output the layers read, up to views and copies; or the reason why there is none."""
        source, why = self.source(layers)
        if source is not None and not source.mixes:
            return None, f"{source.name!r} before it works channel by channel, so a rotation cannot fold into it"
        return source, why

    def _fold(self, source: FoldTarget, hadamard: Hadamard) -> None:
        """Rotate the output channels of the linear layer that precedes the rotated ones."""
        for name in source.parameters:
            parameter = self.model.get_parameter(name)
            parameter.copy_(_rotated_rows(parameter.detach(), hadamard))
        owner = self.model.get_submodule(source.name)
        if isinstance(owner, Layer):
            owner.forget_scales((WEIGHT,))


def _rotated_rows(weight: Tensor, hadamard: Hadamard) -> Tensor:
    """W' with x W'^T = (x W^T) R: the transform along the rows of a weight, or along a bias."""
    return hadamard.apply(weight) if weight.dim() == 1 else hadamard.apply(weight.t()).t()
