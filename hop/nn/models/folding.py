"""fold_batch_norms: train quantized layers together with the batch norms after them (folded.py).

The norm of a layer is not guessed: torch.fx traces the forward in training and in eval mode, or the caller names pairs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx, nn

from hop.compat import dtensor
from hop.nn.layers.base import Layer, modules_of, not_a_model
from hop.nn.layers.convolutions import CONVOLUTIONS
from hop.nn.layers.folded import FOLDABLE, FoldedBatchNorm
from hop.nn.layers.linear import Linear
from hop.nn.weights.master import MasterWeight

_LAYERS = (Linear, *CONVOLUTIONS)
# dimensions after the channels; for BatchNorm1d 0 or 1
_DIMS: dict[type[nn.Module], int] = dict(zip(FOLDABLE, (0, 2, 3), strict=True))


@dataclass(frozen=True)
class Fold:
    """The result for one batch norm."""

    norm: str
    layer: str  # the layer it was folded into; "" if none
    reason: str = ""  # why it was not folded


@dataclass(frozen=True)
class FoldReport:
    """The result of `fold_batch_norms`: a row for each batch norm of the model. str() formats it as a table."""

    rows: tuple[Fold, ...]

    @property
    def folded(self) -> int:
        """The number of batch norms that were folded."""
        return sum(not row.reason for row in self.rows)

    def __str__(self) -> str:
        table = [
            ("batch norm", "folded into"),
            *((r.norm, r.layer if not r.reason else f"- {r.reason}") for r in self.rows),
        ]
        width = max(len(a) for a, _ in table)
        return "\n".join(f"{a:{width}}  {b}" for a, b in table)


def fold_batch_norms(model: nn.Module, pairs: Sequence[tuple[str, str]] | None = None) -> FoldReport:
    """Let quantized layers of `model` compute the batch norms after them, in place.

    Layer and norm then train as one layer, with the statistics of each batch until `freeze_statistics_`, and the
    running statistics after it. Call it after hop.nn.convert. A FoldedBatchNorm with the same Parameters and buffers
    replaces each folded batch norm. Supported layers: Linear, Conv1d to 3d and ConvTranspose1d to 3d.

    Args:
        pairs: names of a layer and of the batch norm that alone reads its result. None: find them with torch.fx, which
            must be able to trace the model.

    Returns:
        A row for each batch norm: the layer it was folded into, or why it was not.

    Raises:
        ValueError: the model cannot be traced, or one of `pairs` cannot be folded. No layer is changed then.
    """
    if not isinstance(model, nn.Module):
        raise not_a_model("fold_batch_norms", model)
    modules = dict(modules_of(model, every_name=True))
    norms: dict[str, nn.Module] = {
        name: m for name, m in modules_of(model) if isinstance(m, nn.modules.batchnorm._BatchNorm)
    }
    reasons: dict[str, str] = {}
    if pairs is None:
        layers, reasons = _traced(model, norms)
    else:
        layers = _named(modules, pairs)
    for norm, layer in list(layers.items()):
        if (why := _why_not(modules[layer], modules[norm])) is not None:
            if pairs is not None:
                raise ValueError(f"fold_batch_norms: pairs: ({layer!r}, {norm!r}): {why}; leave the pair out")
            reasons[norm] = f"{layer!r}: {why}"
            del layers[norm]
    for norm, layer in layers.items():
        _fold(model, modules, layer, norm)
    return FoldReport(tuple(Fold(n, layers.get(n, ""), "" if n in layers else reasons.get(n, _UNNAMED)) for n in norms))


def freeze_statistics_(model: nn.Module) -> nn.Module:
    """Keep the running statistics of folded batch norms from now on, in place.

    Training then computes bit for bit what eval mode and the frozen and exported model compute. Call it once the
    statistics have settled, with some epochs left.

    Returns:
        model.

    Raises:
        ValueError: the model has no folded batch norm.
    """
    if not isinstance(model, nn.Module):
        raise not_a_model("freeze_statistics_", model)
    norms = [m for m in model.modules() if isinstance(m, FoldedBatchNorm)]
    if not norms:
        raise ValueError(
            f"freeze_statistics_: model={type(model).__name__} has no folded batch norms; call "
            "hop.nn.fold_batch_norms(model) first"
        )
    for norm in norms:
        norm.freeze_statistics_()
    return model


_UNNAMED = "it is not in pairs"


def _named(modules: dict[str, nn.Module], pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The layer's name for each norm's name."""
    layers: dict[str, str] = {}
    seen = set[int]()
    for layer, norm in pairs:
        for name in (layer, norm):
            if name not in modules:
                raise ValueError(f"fold_batch_norms: pairs: the model has no module {name!r}; correct the name")
            if id(modules[name]) in seen:
                raise ValueError(f"fold_batch_norms: pairs: {name!r} is in two of them; leave one out")
            seen.add(id(modules[name]))
        layers[norm] = layer
    return layers


def _traced(model: nn.Module, norms: dict[str, nn.Module]) -> tuple[dict[str, str], dict[str, str]]:
    """For each norm, the layer whose result it reads in training and in eval mode; and the reasons for norms without
    one.
    """
    modes = {module: module.training for module in model.modules()}
    graphs: list[fx.Graph] = []
    try:
        for training in (True, False):
            for module in modes:
                module.training = training
            graphs.append(fx.Tracer().trace(model))
    except Exception as error:  # the model's forward may raise anything on proxies
        raise ValueError(
            f"fold_batch_norms: torch.fx cannot trace model={type(model).__name__} ({error}); give pairs=[(layer, norm)"
            ", ...] of names"
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training
    modules = dict(modules_of(model, every_name=True))
    names = {id(m): n for n, m in modules_of(model)}
    layers: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for graph in graphs:
        calls: dict[str, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.op == "call_module":
                calls.setdefault(names[id(modules[str(node.target)])], []).append(node)
        for norm in norms:
            layer, why = _source(norm, calls, lambda node: names[id(modules[str(node.target)])])
            if why or layers.setdefault(norm, layer) != layer:
                reasons.setdefault(norm, why or "it follows another layer in training than in eval mode")
    return {norm: layer for norm, layer in layers.items() if norm not in reasons}, reasons


def _source(norm: str, calls: dict[str, list[fx.Node]], name_of: Callable[[fx.Node], str]) -> tuple[str, str]:
    """The layer whose result a norm reads in a graph, or the reason why there is none."""
    at = calls.get(norm, [])
    if len(at) != 1:
        return "", f"it is called {len(at)} times"
    source = [*at[0].args, *at[0].kwargs.values()][0]
    if not isinstance(source, fx.Node) or source.op != "call_module":
        return "", "it does not read the result of a layer"
    layer = name_of(source)
    if len(source.users) > 1:
        others = ", ".join(sorted(str(user.target) for user in source.users if user is not at[0]))
        return layer, f"the result of {layer!r} is read elsewhere, too, by {others}"
    if len(calls[layer]) > 1:
        return layer, f"{layer!r} is called {len(calls[layer])} times"
    return layer, ""


def _why_not(layer: nn.Module, norm: nn.Module) -> str | None:
    """The reason why a layer cannot compute the norm; None if it can."""
    if not isinstance(norm, FOLDABLE) or type(norm) not in FOLDABLE:
        return f"{type(norm).__name__} is not BatchNorm1d, BatchNorm2d or BatchNorm3d"
    if not isinstance(layer, _LAYERS) or type(layer) not in _LAYERS:
        hint = ", which hop.nn.convert has not converted" if not isinstance(layer, Layer) else ""
        return f"{type(layer).__name__} is not a quantized linear layer or convolution{hint}"
    if norm.running_mean is None:
        return "track_running_stats=False has no running statistics to fold"
    if layer.frozen:
        return "the layer is frozen; fold before hop.nn.freeze"
    if layer.norm is not None:
        return "another batch norm is folded into the layer"
    if isinstance(dtensor.own_part(layer.weight), MasterWeight):
        return "gather_as_codes has prepared the layer"
    channels = layer.out_features if isinstance(layer, Linear) else layer.out_channels
    dims = layer.example_dims - 1
    if norm.num_features != channels or not (dims == _DIMS[type(norm)] or (dims == 1 and _DIMS[type(norm)] == 0)):
        return f"{type(norm).__name__}({norm.num_features}) does not fit {type(layer).__name__} of {channels} channels"
    return None


def _fold(model: nn.Module, modules: dict[str, nn.Module], layer: str, norm: str) -> None:
    target, old = modules[layer], modules[norm]
    assert isinstance(target, Layer) and isinstance(old, FOLDABLE)
    new = FoldedBatchNorm(old)
    for name, module in modules.items():
        if module is old:
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, new)
    target.fold(new)
