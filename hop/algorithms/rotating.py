"""rotate: a Hadamard transform of blocks of channels between the two operands of a product.

    x W^T = (x R) (W R)^T      R block-diagonal and orthogonal: diag(signs) · H / √n in each block

An outlier is spread over its block, so that elements which share a scale have more nearly one size. Ashkboos et al.
2024, "QuaRot" (arXiv 2404.00456); of the format's own block, Egiazarian et al. 2025 (arXiv 2509.23202).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hop.algorithms.candidates import batches_of
from hop.algorithms.flow import Source
from hop.algorithms.stages import Inputs, Stages, flow_of, lost_by
from hop.nn.contexts import INPUT, WEIGHT
from hop.nn.conversion import Rules, convert, settle_weights
from hop.nn.layer import Layer, not_a_model
from hop.nn.layers import Linear
from hop.nn.selectors import Selector
from hop.nn.transforms import InputTransform
from hop.numerics.hadamard import SIGNS, SIZES, Hadamard, largest_size
from hop.numerics.schemes import Scheme


@dataclass(frozen=True)
class Rotation:
    """The settings of `rotate`.

    Args:
        size: how many channels are transformed together; None for the block of the quantizer of the activations, or of
            the weight where these stay floats: 32 in MX formats, 16 in NVFP4. Where that is no size of SIZES, as for
            whole rows, or does not divide the layer's channels, the largest of SIZES that divides them.
        seed: of the signs, for other sizes than 16, which has those of hop.hadamard.SIGNS.
        always: whether layers are rotated though their results on the data get no nearer to those in floats.

    Raises:
        ValueError: size is none of SIZES.
        TypeError: seed is no integer, or always is neither True nor False.
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
        """The transform for a layer of so many channels, which lie in heads; None where no size divides them."""
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
    """What became of one layer. Errors are of its results on the data that was looked at, Σ|y - ŷ|² / Σ|y|², of all
    layers that read the same input; NaN where there was none."""

    name: str
    size: int  # how many channels are transformed together; 0: none are
    before: float  # the error without the rotation
    after: float
    folded_into: str = ""  # the module whose weight gives rotated results; "" for a layer that rotates its input
    note: str = ""  # why it is not rotated, or why that is not folded


def rotate(
    model: nn.Module,
    rules: Rules,
    batches: Iterable[Any],
    *,
    filter: Selector | None = None,
    settings: Rotation = Rotation(),
) -> Any:
    """Let Linear layers transform their inputs by a block Hadamard matrix before these are quantized, with the inverse
    in their weight, in place: layers are converted as by hop.nn.convert, and compute the same in floats, but for
    roundings. `hop.quantize_` or `gptq`, with the same rules, then finish the model.

        rotate(model, "mxfp4", batches)
        gptq(model, "mxfp4", batches)

    The input of an attention's last projection is rotated by the value projection, within each head, at no cost, where
    the exported graph says that the one leads to the other; so are those of linear layers with no function between.
    Others transform their input in each call (`hop.nn.Linear.input_transform`).

    Args:
        rules, filter: as `hop.quantize_` takes them.
        batches: inputs, as hop.nn.calibrate takes them; kept in a list meanwhile.
        settings: which sizes, and whether always.

    Returns:
        The model. Its `rotation_report` has a RotatedLayer for each layer with a scheme: where the rotation is no
        better than none, or a layer is not reached, shares its weight or is no Linear, its note says so.

    Raises:
        TypeError, ValueError: as `smoothquant`.
    """
    if not isinstance(model, nn.Module):
        raise not_a_model("rotate", model)
    if not isinstance(settings, Rotation):
        raise TypeError(f"rotate: settings must be a Rotation, got {settings!r}; give Rotation()")
    data = batches_of("rotate", batches)
    settle_weights(model, rules, filter)
    flow = flow_of(model, data[0])
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

    def note(self, layer: Layer, note: str, **fields: Any) -> None:
        self.rows[layer] = replace(self.rows[layer], note=note, **fields)

    def stage(self, layers: list[Linear], inputs: Inputs) -> None:
        """Layers that read one input take one rotation, if they have one scheme."""
        if len({layer.scheme for layer in layers}) > 1:
            for layer in layers:
                self.stage([layer], inputs)
            return
        source, why = self._foldable(layers)
        channels = layers[0].in_features
        hadamard = self.settings.hadamard(layers[0].scheme, channels, None if source is None else source.head)
        if hadamard is None:
            for layer in layers:
                self.note(layer, f"no rotation: no size that is asked for divides its {channels} channels")
            return
        lost, x = lost_by(layers, inputs), inputs.rows
        value_range = torch.stack([inputs.low.amin(), inputs.high.amax()])
        before = lost(x, lambda weight: weight, value_range)
        rotated = hadamard.apply(x)
        after = lost(rotated, hadamard.apply, rotated)
        for layer in layers:
            if not (after < before or self.settings.always):
                self.note(layer, "no rotation: it is no better", before=before, after=before)
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

    def _foldable(self, layers: list[Linear]) -> tuple[Source | None, str]:
        """A linear layer whose results, moved alone, the layers read."""
        source, why = self.source(layers)
        if source is not None and not source.mixes:
            return None, f"{source.name!r} before it has channels of its own, which no rotation mixes"
        return source, why

    def _fold(self, source: Source, hadamard: Hadamard) -> None:
        """Let a linear layer give rotated results: its rows are what the rotation mixes."""
        for name in source.parameters:
            parameter = self.model.get_parameter(name)
            parameter.copy_(_rotated_rows(parameter.detach(), hadamard))
        owner = self.model.get_submodule(source.name)
        if isinstance(owner, Layer):
            owner.forget_scales((WEIGHT,))


def _rotated_rows(weight: Tensor, hadamard: Hadamard) -> Tensor:
    """W' with x W'^T = (x W^T) R: the transform along the rows; of a bias, along it."""
    return hadamard.apply(weight) if weight.dim() == 1 else hadamard.apply(weight.t()).t()
