"""quantize_: a model, quantized in one call."""

import importlib
import logging
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from hop.nn.attention_rules import AttentionRules, checked_attention
from hop.nn.calibration import calibrate as set_scales
from hop.nn.conversion import Rules, checked, convert, has_static_scale, settle_weights, takes
from hop.nn.exact import check_layers, check_schemes, make_exact
from hop.nn.freezing import freeze
from hop.nn.functions import Function
from hop.nn.layer import Layer
from hop.nn.report import Report
from hop.nn.selectors import Selector
from hop.numerics.schemes import Scheme

log = logging.getLogger("hop")


def quantize_(
    model: nn.Module,
    scheme: Rules,
    *,
    filter: Selector | None = None,
    calibrate: Iterable[Any] | None = None,
    pack: bool = True,
    fuse: bool = False,
    attention: AttentionRules = None,
    exact: bool = False,
) -> Any:
    """Quantize a model, in place: convert its layers, find static scales where the scheme has some, and replace the
    float weights by their codes, in the layout that this machine reads fastest.

    It prints nothing; the logger "hop" gets a summary, at the level INFO, and `model.hop_report` is a table of what
    became of every parameter. The steps by themselves are hop.nn.convert, calibrate and freeze. Weights that
    torch.nn.utils.prune, weight_norm, spectral_norm or parametrize compute are quantized as computed in eval mode, and
    become plain Parameters before.

    Args:
        model: a float model, on any device. On "meta" there is nothing to quantize yet, and
            load_state_dict(..., assign=True) gives it the weights of a model that was quantized alike and saved.
        scheme: a name, such as "int8", "int4_weight_64" or "fp8" (hop.schemes.named); a hop.Scheme; a hop.Quantizer,
            for weights alone; or several by selectors, such as {"lm_head": "int8", "*": "int4"}, None to leave layers
            in floats, of which the first that matches counts. See hop.nn.convert.
        filter: which layers: a module type, a pattern for their names, or a function (name, module) -> bool; None for
            all that hop.nn.convert knows.
        calibrate: batches of inputs, as hop.nn.calibrate takes them, for schemes with static scales of activations;
            they are not read for others.
        pack: whether weights are laid out for the kernels of this machine. False keeps the plain form, which is what
            programs for other machines should hold. state_dicts are plain in any case.
        fuse: whether norms and activations are converted too (hop.nn.convert, functions=True), and find the codes of
            their results for the layers that read them, in the pass that computes them: in eager mode, without
            gradients, on CPUs that the kernels know. The bits are those of the model without that.
        attention: how query, key and value are multiplied, such as "int8"; None for as before (hop.nn.convert).
        exact: whether the model gives the same bits on every route and CPU level, in any batch and with any number of
            threads. The functions and sums that its forward calls are then those of hop.scaled, and attention is
            "int8" unless `attention` says otherwise. hop.export.check_exact lists what is left to depend on more.

    Returns:
        The model; another one where its root was a layer itself.

    Raises:
        ValueError: as convert; or the scheme has static scales, and calibrate is None; or exact=True, and the products
            of a scheme, or of a layer that stays in floats, depend on more than their inputs.
        TypeError: as convert and calibrate.
    """
    _check_flags(pack=pack, fuse=fuse, exact=exact)  # before anything is converted
    rules = checked(scheme, filter)
    static = [s for _, s in rules if s is not None and has_static_scale(s)]
    if static and calibrate is None:
        raise ValueError(
            f"quantize_: calibrate=None, and the scheme {static[0]} has static scales, which are found from data; give "
            "calibrate=batches of inputs, or take a dynamic scheme such as 'int8'"
        )
    if exact:
        attention = "int8" if attention is None else attention
        check_schemes("quantize_", (s for _, s in rules), (s for _, s in checked_attention(attention)))
        check_layers("quantize_", model, lambda name, module: takes(rules, name, module))
    attends = checked_attention(attention)
    settle_weights(model, scheme, filter)
    converted: Any = convert(model, scheme, filter=filter, functions=fuse, attention=attention)
    if static and calibrate is not None:
        set_scales(converted, calibrate)
    report: Report = converted.hop_report
    if any(isinstance(row.scheme, Scheme) for row in report.rows):
        freeze(converted, pack)
    if fuse:
        for module in converted.modules():
            if isinstance(module, Function):
                module.fuse()
    if exact and not isinstance(converted, Layer):
        make_exact(converted, next((s for _, s in attends), None))
    if _is_of_transformers(converted):  # by name, as that package is above this one
        importlib.import_module("hop.integrations.quantizer").make_serializable(converted, pack)
    log.info("quantize_: %s layers; %s", report.converted, report.summary)
    return converted


def _is_of_transformers(model: nn.Module) -> bool:
    """Whether it is a model of transformers; imports nothing."""
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def _check_flags(**flags: Any) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"quantize_: {name} must be True or False, got {flag!r}; give one of them")
