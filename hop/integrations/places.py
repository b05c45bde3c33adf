"""Selection of the layers of a transformers model that are quantized; the others stay in floats."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.quantizers_utils import should_convert_module

from hop.nn.layers.base import Layer, modules_of
from hop.nn.models.conversion import Rule
from hop.nn.models.report import Report
from hop.nn.weights.holders import Weight, holder_of
from hop.nn.weights.recomputed import recomputed
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme


def weight_of(model: nn.Module, name: str) -> Layer | Weight | None:
    """The layer, or the weight in a holder, whose quantized weight is the parameter `name`; None if there is none."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    holder = holder_of(module)
    owner: Layer | Weight | None = module if isinstance(module, Layer) and leaf == "weight" else None
    if holder is not None and leaf in holder.names:
        owner = Weight(holder, leaf)
    return None if owner is None or owner.frozen_quantizer() is None else owner


def conversion_filter(model: PreTrainedModel, names: Sequence[str] | None) -> Callable[[str, nn.Module], bool]:
    """A selector for hop.nn.convert of the layers to quantize while a float checkpoint is read.

    Args:
        names: modules to leave in floats, matched as in transformers; None for the default.

    Raises:
        ValueError: a name matches no module.
    """
    modules = [name for name, _ in modules_of(model, every_name=True) if name]
    kept = model._keep_in_fp32_modules or []  # modules that the model requires in float32
    for name in names or ():
        if all(should_convert_module(module, [name]) for module in modules):
            raise ValueError(
                f"HopConfig: modules_to_not_convert: {name!r} is not a module of {type(model).__name__}; its modules "
                f"are {', '.join(modules)}"
            )
    patterns = [*(names or ()), *kept]
    floats = {module for module in modules if not should_convert_module(module, patterns)}
    if names is None:
        floats |= _heads(model)
    floats |= {name for name, module in modules_of(model, every_name=True) if recomputed(module)}
    floats |= tied(model, floats)
    return lambda name, module: not any(name == own or name.startswith(f"{own}.") for own in floats)


def _heads(model: PreTrainedModel) -> set[str]:
    """The names of the output embeddings, of the last layer and of all tied modules."""
    output = model.get_output_embeddings()
    heads = {name for name, module in modules_of(model, every_name=True) if output is not None and module is output}
    last = [name for name, _ in model.named_parameters()][-1:]
    return heads | {_module(name) for name in last} | {_module(name) for pair in _ties(model) for name in pair}


def tied(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """`names`, and all modules that share a weight with one of them."""
    groups = [{_module(target), _module(source)} for target, source in _ties(model)]
    found = set(names)
    for _ in groups:  # a source may itself be tied to another module
        for group in groups:
            found |= group if group & found else set()
    return found


def _ties(model: PreTrainedModel) -> list[tuple[str, str]]:
    return list(getattr(model, "all_tied_weights_keys", {}).items())


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def check_ties(model: PreTrainedModel) -> None:
    """Raise ValueError if tied layers have different quantizers, because they share one weight."""
    for target, source in _ties(model):
        pair = (target, source)
        if any(not isinstance(model.get_submodule(_module(name)), nn.Linear | nn.Embedding) for name in pair):
            continue
        one, other = (_quantizer(weight_of(model, name)) for name in pair)
        if one != other:
            raise ValueError(
                f"HopConfig: scheme: {target} is tied to {source}, and one would be quantized by {one}, the other by "
                f"{other}; give both the same scheme, or leave both in floats"
            )


def _quantizer(layer: Layer | Weight | None) -> Quantizer | None:
    return None if layer is None else layer.frozen_quantizer()


def rules_with_any_prefix(model: PreTrainedModel, rules: Sequence[tuple[str, Scheme | None]]) -> list[Rule]:
    """The rules that match some module, for a model that may have been saved with or without a head.

    A module is matched under its own name, and with the base model's prefix added or removed.
    """
    prefix = f"{model.base_model_prefix}."

    def selector(pattern: str) -> Callable[[str, nn.Module], bool]:
        def matches(name: str, module: nn.Module | None = None) -> bool:
            return any(fnmatchcase(n, pattern) for n in (name, prefix + name, name.removeprefix(prefix)))

        return matches

    pairs = [(selector(pattern), scheme) for pattern, scheme in rules]
    return [(matches, scheme) for matches, scheme in pairs if any(matches(*m) for m in modules_of(model))]


def restore(model: nn.Module, names: Iterable[str], reason: str) -> None:
    """Replace the named layers by float ones, dequantize weights in holders, and record the reason in the model's
    report.
    """
    restored: dict[int, nn.Module] = {}
    names = set(names)
    for name in names:
        layer = model.get_submodule(name)
        holder = holder_of(layer)
        if holder is not None:
            holder.thaw()
        elif isinstance(layer, Layer):
            restored.setdefault(id(layer), layer.to_float())
            model.set_submodule(name, restored[id(layer)])
    report = getattr(model, "hop_report", None)
    if isinstance(report, Report) and names:
        rows = [replace(r, scheme=None, quantized=0, reason=reason) if r.name in names else r for r in report.rows]
        model.hop_report = replace(report, rows=tuple(rows))  # type: ignore[assignment]  # a plain attribute
