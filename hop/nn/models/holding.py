"""hold_weights: keep the codes of weights over microbatches."""

from types import TracebackType

from torch import Tensor, nn

from hop.nn.layers.base import modules_of, not_a_model
from hop.nn.layers.linear import Linear
from hop.nn.weights.recomputed import check_plain


class hold_weights:
    """Context manager in which each Linear of a model quantizes its weight once, for all microbatches of a step.

        with hop.nn.hold_weights(model):
            for batch in microbatches:
                loss(model(batch)).backward()
        optimizer.step()

    Args:
        model: its layers of type hop.nn.Linear keep the codes of their weights.

    Raises:
        RuntimeError: on exit, if a weight was changed inside, for example by optimizer.step(), because calls after the
            change used the old codes; on entry, if such contexts are nested for one layer.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise not_a_model("hold_weights", model)
        self._layers = {name: layer for name, layer in modules_of(model) if isinstance(layer, Linear)}
        self._before: dict[str, tuple[Tensor, int]] = {}

    def __enter__(self) -> None:
        for name, layer in self._layers.items():
            if layer.holds:
                raise RuntimeError(
                    f"hold_weights: the layer {name!r} holds its weight already; do not nest the contexts"
                )
        check_plain("hold_weights", self._layers.items())
        for name, layer in self._layers.items():
            self._before[name] = (layer.weight, layer.weight._version)
            layer.hold_weight(True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        changed: list[str] = []
        for name, layer in self._layers.items():
            layer.hold_weight(False)
            weight, version = self._before[name]
            if layer.weight is not weight or weight._version != version:
                changed.append(name)
        if changed and kind is None:
            raise RuntimeError(
                f"hold_weights: the weights of {', '.join(map(repr, changed))} changed inside, while their old codes "
                "were in use; update weights after the context"
            )
