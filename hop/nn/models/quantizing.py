"""quantize_: quantize a model in one call."""

import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from hop.nn.layers.base import Layer
from hop.nn.layers.functions import Function
from hop.nn.models.attention_rules import AttentionRules, checked_attention
from hop.nn.models.calibration import calibrate as set_scales
from hop.nn.models.conversion import (
    Rule,
    Rules,
    convert,
    has_static_scale,
    layers_taken,
    rules_of,
    settle_weights,
    takes,
)
from hop.nn.models.exact import check_layers, check_schemes, make_exact
from hop.nn.models.freezing import freeze
from hop.nn.models.report import Report
from hop.nn.models.requantizing import requantize_
from hop.nn.models.selectors import Selector
from hop.nn.weights.holders import holder_of
from hop.numerics.attention_schemes import AttentionScheme
from hop.numerics.schemes import Scheme

log = logging.getLogger("hop")

_WEIGHTS = ("search", "rule", "gptq")


Batches: TypeAlias = Iterable[object] | Callable[[], Iterable[object]]
"""Batches of inputs, or a function that returns them."""


def quantize_(
    model: nn.Module,
    scheme: Rules,
    *,
    filter: Selector | None = None,
    calibrate: Batches | None = None,
    weights: Literal["search", "rule", "gptq"] = "search",
    pack: bool = True,
    fuse: bool = False,
    attention: AttentionRules = None,
    exact: bool = False,
    requantize: bool = False,
) -> Any:
    """Quantize a model in place: convert its layers, calibrate static scales, and freeze the weights.

    It prints nothing; the logger "hop" gets a summary at level INFO, and `model.hop_report` is a table of how every
    parameter was handled. The steps are also available as hop.nn.convert, calibrate and freeze. Weights that
    torch.nn.utils.prune, weight_norm, spectral_norm or parametrize compute first become plain Parameters, with their
    values in eval mode.

    Args:
        model: a float model on any device. On "meta" only the structure is converted; load_state_dict(..., assign=True)
            then loads the weights of a saved model that was quantized in the same way.
        scheme: a name, such as "int8", "int4_weight_64" or "fp8" (hop.schemes.named); a hop.Scheme; a hop.Quantizer,
            for weights only; or several by selector, such as {"lm_head": "int8", "*": "int4"}, of which the first
            match applies. None leaves layers in floats. See hop.nn.convert. A single scheme of fewer than 8 bits
            leaves embeddings, and layers that share their weights, at 8 bits ("int8_weight", or "int8" if `exact`);
            {"*": scheme} does not.
        filter: which layers: a module type, a pattern for their names, or a function (name, module) -> bool; None for
            all that hop.nn.convert supports.
        calibrate: batches of inputs, as for hop.nn.calibrate, or a function that returns them. Read only for static
            activation scales and weights="gptq", for which 32 samples are enough.
        weights: how scales, zero points and codes of weights are chosen. "search": those of least squared error, for up
            to 6 bits in blocks (hop.quantize_weight). "rule": those of the scheme's rule, which layers that were
            quantized before, and so may have been trained, always keep. "gptq": by GPTQ (hop.algorithms.gptq), for the
            results of Linear and Conv2d layers on `calibrate`, with searched scales; `model.gptq_report` has the error
            of each layer before and after.
        pack: whether to store weights in the layout that this machine's kernels read fastest. Use False for programs
            that are exported for other machines. state_dicts are plain in any case.
        fuse: whether to convert norms and activations too (hop.nn.convert, functions=True), and let them quantize their
            results for the next layers in the same pass. This happens in eager mode without gradients, on CPUs with
            native kernels. Results have the same bits as without.
        attention: how query, key and value are multiplied, such as "int8"; None for no change (hop.nn.convert).
        exact: whether the model gives the same bits on every route and CPU level, in any batch and with any number of
            threads. hop.scaled then computes the functions and sums that its forward calls, and attention is "int8"
            unless `attention` says otherwise. hop.export.check_exact lists operators whose results may still differ.
        requantize: whether to quantize frozen weights again, such as those of a GGUF file, from the values of their
            codes. At most a few million elements, or the rows that share a scale, are in floats at a time. Without it,
            layers with frozen weights stay as they are, with the reason in the report.

    Returns:
        The model; a new module if the model was itself a layer.

    Raises:
        ValueError: as convert; calibrate is None, and the scheme has static scales or weights="gptq"; or exact=True,
            and the products of a scheme, or of a layer that stays in floats, depend on more than their inputs.
        TypeError: as convert and calibrate.
    """
    _check_flags(pack=pack, fuse=fuse, exact=exact, requantize=requantize)
    rules = rules_of(model, scheme, filter, exact)
    attention = _attention(model, rules, attention, exact)
    data = _data(rules, calibrate, weights)
    settle_weights(model, rules)
    if requantize:
        requantize_(list(layers_taken(model, rules)), weights != "rule")
    trained = [m for m in model.modules() if isinstance(m, Layer) or holder_of(m) is not None]
    converted = convert(model, rules, functions=fuse, attention=attention)
    if data is not None and _static_scheme(rules) is not None:
        set_scales(converted, data)
    report: Report = converted.hop_report
    if any(isinstance(row.scheme, Scheme) for row in report.rows):
        if weights == "gptq":  # imported by name, because that package is on a higher level
            algorithms = importlib.import_module("hop.algorithms.gptq")
            converted.gptq_report = algorithms.freeze_by_data(converted, data, pack)
        freeze(converted, pack, trained=None if weights == "rule" else set(trained))
    _finish(converted, checked_attention(attention), (pack, fuse, exact))
    log.info("quantize_: %s layers; %s", report.converted, report.summary)
    return converted


def _attention(model: nn.Module, rules: Sequence[Rule], attention: AttentionRules, exact: bool) -> AttentionRules:
    """The rules of attention, checked: "int8" unless given, if the model is `exact`."""
    attention = "int8" if attention is None and exact else attention
    attends = checked_attention(attention)
    if exact:
        check_schemes("quantize_", (s for _, s in rules), (s for _, s in attends))
        check_layers("quantize_", model, lambda name, module: takes(rules, name, module))
    return attention


def _static_scheme(rules: Sequence[Rule]) -> Scheme | None:
    """The first scheme with static scales."""
    return next((s for _, s in rules if s is not None and has_static_scale(s)), None)


def _data(rules: Sequence[Rule], calibrate: Batches | None, weights: object) -> Iterable[object] | None:
    """The batches that the rules and `weights` need; None if they need none. Raises ValueError if there are none."""
    if not isinstance(weights, str) or weights not in _WEIGHTS:
        error = ValueError if isinstance(weights, str) else TypeError
        raise error(f"quantize_: weights must be one of {', '.join(map(repr, _WEIGHTS))}, got {weights!r}; give one")
    static, by_data = _static_scheme(rules), weights == "gptq"
    if static is None and not by_data:
        return None
    if calibrate is None:
        what = "weights='gptq' chooses codes" if by_data else f"the scheme {static} has static scales, which are found"
        remedy = "weights='search'" if by_data else "a dynamic scheme such as 'int8'"
        raise ValueError(
            f"quantize_: calibrate=None, but {what} from data; pass calibrate=batches of inputs, or use {remedy}"
        )
    batches = calibrate() if callable(calibrate) else calibrate
    if by_data and isinstance(batches, Iterable) and not isinstance(batches, Tensor):  # others are refused later
        return list(batches)
    return batches


def _finish(
    model: nn.Module, attends: Sequence[tuple[Selector, AttentionScheme | None]], options: tuple[bool, bool, bool]
) -> None:
    """Fuse functions, make the model exact, and let transformers save it, by `options`: pack, fuse and exact."""
    pack, fuse, exact = options
    if fuse:
        for module in model.modules():
            if isinstance(module, Function):
                module.fuse()
    if exact and not isinstance(model, Layer):
        make_exact(model, next((s for _, s in attends), None))
    if _is_of_transformers(model):  # imported by name, because that package is on a higher level
        importlib.import_module("hop.integrations.quantizer").make_serializable(model, pack)


def _is_of_transformers(model: nn.Module) -> bool:
    """Whether the model is one of transformers. Does not import transformers."""
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def _check_flags(**flags: object) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"quantize_: {name} must be True or False, got {flag!r}; give one of them")
