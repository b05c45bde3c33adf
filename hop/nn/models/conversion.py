"""convert: replace the float layers of a model by quantized ones."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hop.compat.modules import after_loading, remove_load_hooks
from hop.compat.pytree import StateDict
from hop.impls.quantize import dequantize
from hop.nn.attention.multihead import InputProjection, MultiheadAttention, OutputProjection
from hop.nn.contexts import WEIGHT
from hop.nn.layers.base import Layer, check_unsharded, modules_of, not_a_model
from hop.nn.layers.folded import FROZEN
from hop.nn.layers.functions import Function
from hop.nn.layers.linear import Embedding, Linear
from hop.nn.models.attention_rules import AttentionRules, checked_attention, convert_attention
from hop.nn.models.kinds import FUNCTION_OF, LAYERS, LEFT, function_of, layer_of
from hop.nn.models.report import Conversion, Report, counted
from hop.nn.models.selectors import Selector, check_selector, matches
from hop.nn.models.siblings import share_input, siblings
from hop.nn.weights.holders import hold, kind_of
from hop.nn.weights.recomputed import check_plain, recomputed, remedied, settle
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import INT8_DYNAMIC, INT8_WEIGHT, Scheme, named
from hop.tensor import QuantizedTensor

_NO_RULE = "no rule matches"

Rule = tuple[Selector, Scheme | None]
Spelled = Scheme | Quantizer | str | None
Rules = Scheme | Quantizer | str | Mapping[Selector, Spelled] | Sequence[tuple[Selector, Spelled]]


def convert(
    model: nn.Module,
    rules: Rules,
    learn_scales: bool = False,
    *,
    filter: Selector | None = None,
    functions: bool = False,
    attention: AttentionRules = None,
) -> Any:
    """Replace the float layers of `model` by quantized ones, in place.

    Converted are Linear, Embedding, Conv1d to 3d, ConvTranspose1d to 3d and MultiheadAttention.

    Quantized layers keep the same Parameters, so optimizers stay valid and tied weights stay tied; a module used in
    several places is converted once. A layer that is already quantized gets the new scheme, and keeps its learn_scales.
    Subclasses are left alone, because they may compute something else. Weights computed by hooks of
    torch.nn.utils.prune, weight_norm and spectral_norm are quantized as computed; layers of torch.nn.utils.parametrize
    are left alone, and can be parametrized after conversion. An attention's output projection follows its own rule, or
    else that of the attention. Sibling layers that read one input, such as query, key and value, quantize it once
    (hop.nn.share_input). Experts of transformers' mixtures keep their class, and compute in the scheme. Norms,
    activations and softmax are converted if the scheme quantizes outputs.

    Args:
        model: if it is such a layer itself, its replacement is returned.
        rules: for all layers a Scheme, its name, such as "int8", or a Quantizer of weights; or several of them by
            selector, as a dict or as pairs, of which the first match applies. A scheme of None leaves the layer alone.
            A selector is a module type, a pattern for the name such as "decoder.*.proj", or a function
            (name, module) -> bool. Layers that match no selector are left alone.
        learn_scales: whether static scales are Parameters.
        filter: a selector of the layers that rules apply to; None for all.
        functions: whether norms and activations are also converted when the scheme does not quantize outputs. Their
            results are then floats, from correctly rounded functions and order-independent sums: the same bits on every
            route.
        attention: how query, key and value are multiplied: a hop.attention_schemes.AttentionScheme, its name, such as
            "int8", or several by selector, like rules. Applies to hop.nn.MultiheadAttention, and to modules of
            transformers that use its AttentionInterface. None leaves attention unchanged.

    Returns:
        The model. Its `hop_report` is a Report: a row for each layer, with its scheme or the reason it has none.

    Raises:
        TypeError: rules, a selector, a scheme or model has the wrong type.
        ValueError: a selector matches no layer, or a scheme's name is unknown. The model is not changed then.

    Warns if no layer was converted although a rule has a scheme, or if learn_scales finds no scale to learn.
    """
    if not isinstance(model, nn.Module):
        raise not_a_model("convert", model)
    pairs, attends = checked(rules, filter), checked_attention(attention)
    if [s for s, _ in pairs if type(s) is not _Tables] != ["*"]:
        _check_matches(model, pairs, functions)
    check_unsharded("convert", model, (m for n, m in modules_of(model) if _is_replaced(pairs, n, m)))
    model, rows, matched = _walked(model, pairs, learn_scales)
    model, of_functions = _converted_functions(model, pairs, (learn_scales, functions), matched)
    rows += of_functions
    rows += [] if attention is None else convert_attention(model, attends)
    _unfuse(model)
    _share_inputs(model)
    _check_before_loading(model)
    unused = tuple(repr(s) for i, (s, _) in enumerate(pairs) if rows and i not in matched and type(s) not in _OPTIONAL)
    report = Report(counted(model, rows), unused)
    model.hop_report = report  # type: ignore[assignment]  # a plain attribute, not a submodule
    _warn(model, report, any(scheme is not None for _, scheme in pairs), learn_scales)
    return model


def settle_weights(model: nn.Module, rules: Rules, filter: Selector | None = None) -> None:
    """Make Parameters of weights that hooks or parametrizations compute, in the layers that `convert` would convert.

    In place. For callers that quantize weights permanently and do not train what computes them. Raises as `convert`
    does, before the model is changed.
    """
    if not isinstance(model, nn.Module):
        raise not_a_model("convert", model)
    pairs = checked(rules, filter)
    if [s for s, _ in pairs if type(s) is not _Tables] != ["*"]:
        _check_matches(model, pairs, False)
    check_unsharded("convert", model, (m for n, m in modules_of(model) if _is_replaced(pairs, n, m)))
    check_plain("convert", ((n, m) for n, m in modules_of(model) if isinstance(m, Layer)), unknown=True)
    for name, module in modules_of(model):
        known = _is_known(module) and (layer_of(module) or isinstance(module, Layer) or kind_of(module))
        if known and _choice(pairs, name, module, set())[0] is not None:
            for part in (module, *([module.out_proj] if isinstance(module, nn.MultiheadAttention) else [])):
                settle(part)


def _warn(model: nn.Module, report: Report, has_schemes: bool, learn_scales: bool) -> None:
    """Warn the caller of `convert` if no layer was converted, or learn_scales had no effect."""
    has_functions = any(isinstance(m, Function) for m in model.modules())
    if not (report.converted or has_functions) and has_schemes:
        warnings.warn(f"convert: no layer was converted\n{report}", stacklevel=3)
    elif learn_scales and not any(has_static_scale(row.scheme) for row in report.rows):
        warnings.warn(
            "convert: learn_scales=True makes static scales Parameters, but no scheme has one; use one with "
            "hop.scale_rules.Static, such as hop.schemes.INT8_STATIC",
            stacklevel=3,
        )


def _walked(
    model: nn.Module, pairs: Sequence[Rule], learn_scales: bool
) -> tuple[nn.Module, list[Conversion], set[int]]:
    """Convert layers. Returns the model, a row for each layer, and the indices of the rules that matched one."""
    done: dict[int, tuple[nn.Module, Conversion]] = {}
    rows: list[Conversion] = []
    matched: set[int] = set()
    for name, module in modules_of(model, every_name=True):
        if (reason := next((why for of, why in LEFT.items() if isinstance(module, of)), None)) is not None:
            rows.append(Conversion(name, type(module).__name__, None, reason))
        if not _is_known(module) or isinstance(module, InputProjection | Function):
            continue
        if id(module) in done:
            new, first = done[id(module)]
            rows.append(Conversion(name, first.type, first.scheme, f"the same module as {first.name!r}"))
        else:
            scheme, reason = _choice(pairs, name, module, matched)
            if isinstance(module, OutputProjection.float_type):
                scheme, reason = _of_output(model.get_submodule(name.rpartition(".")[0]), scheme, reason)
            new, row = module, Conversion(name, type(module).__name__, scheme, reason)
            if scheme is not None:
                try:
                    new = _converted(module, scheme, learn_scales)
                except (TypeError, ValueError) as error:
                    row = Conversion(name, row.type, None, str(error))
            done[id(module)] = new, row
            rows.append(row)
        # converting an attention replaced its out_proj
        if new is not module or isinstance(module, OutputProjection.float_type):
            model = _put(model, name, new)
    return model, rows, matched


def _converted_functions(
    model: nn.Module, pairs: Sequence[Rule], options: tuple[bool, bool], matched: set[int]
) -> tuple[nn.Module, list[Conversion]]:
    """Convert norms and activations. Returns the model and a row for each.

    Those whose scheme quantizes outputs are converted, or all that have a scheme. `options`: learn_scales, and whether
    to convert all.
    """
    done: dict[int, Function] = {}
    rows: list[Conversion] = []
    learn_scales, every = options
    for name, module in modules_of(model, every_name=True):
        function = module if isinstance(module, Function) else function_of(module)
        if function is None or not _asks_for_functions(pairs, every):
            continue
        scheme, reason = _choice(pairs, name, module, matched)
        if scheme is None or not (every or scheme.output is not None):
            continue
        of_report = None if scheme.output is None else Scheme(None, None, scheme.output)
        reason = "" if of_report is not None else "floats, by correctly rounded functions"
        try:
            if isinstance(function, Function):
                function.scheme = scheme
            elif id(module) in done:
                model = _put(model, name, done[id(module)])
            else:
                done[id(module)] = FUNCTION_OF[type(function)].from_float(function, scheme, learn_scales)
                model = _put(model, name, done[id(module)])
        except (TypeError, ValueError) as error:
            of_report, reason = None, str(error)
        rows.append(Conversion(name, type(module).__name__, of_report, reason))
    return model, rows


def _asks_for_functions(pairs: Sequence[Rule], every: bool) -> bool:
    return every or any(scheme is not None and scheme.output is not None for _, scheme in pairs)


def float_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict of the float model: without scale state, and with frozen weights dequantized."""
    if not isinstance(model, nn.Module):
        raise not_a_model("float_state_dict", model)
    layers = {name: m for name, m in modules_of(model, every_name=True) if isinstance(m, Layer)}
    states = ("scales.", "input_transform.", "input_order")
    prefixes = tuple(f"{name}.{state}" if name else state for name in layers for state in states)
    result: dict[str, Tensor] = {}
    for key, value in model.state_dict().items():
        path, _, last = key.rpartition(".")
        if key.startswith(prefixes) or last == FROZEN:
            continue
        floats = dequantize(value) if isinstance(value, QuantizedTensor) else value
        result[key] = layers[path].float_weight(floats) if last == WEIGHT and path in layers else floats
    return result


def checked(rules: Rules, filter: Selector | None = None) -> list[Rule]:
    """Convert rules to pairs of a selector and a Scheme or None. Raises as `convert` does."""
    if isinstance(rules, Scheme | Quantizer | str):
        pairs = [("*", rules)]
    else:
        pairs = list(rules.items()) if isinstance(rules, Mapping) else rules
    if not isinstance(pairs, Sequence) or not pairs:
        raise TypeError(
            "convert: rules must be a hop.Scheme, its name, a Quantizer of weights, or several by selector in a dict "
            f"or in pairs (selector, Scheme or None); got {rules!r}; give one such as 'int8'"
        )
    result: list[Rule] = []
    for rule in pairs:
        if not isinstance(rule, tuple) or len(rule) != 2:
            raise TypeError(
                f"convert: rules: a rule must be a pair (selector, Scheme or None), got {rule!r}; give one such as "
                "('*', 'int8')"
            )
        selector, scheme = rule
        check_selector("rules: a selector", selector)
        result.append((selector, _scheme(selector, scheme)))
    if filter is None:
        return result
    check_selector("filter", filter)
    return [(_Except(filter), None), *result]


def rules_of(model: nn.Module, rules: Rules, filter: Selector | None = None, exact: bool = False) -> list[Rule]:
    """The rules by which a float model is quantized for good: those of `checked`, but INT8_WEIGHT for embeddings and
    layers that share their weights if `rules` is a single scheme of fewer than 8 bits; INT8_DYNAMIC if the model shall
    be `exact`.
    """
    pairs = checked(rules, filter)
    weights = None if pairs[-1][1] is None else pairs[-1][1].rhs
    is_single = isinstance(rules, Scheme | Quantizer | str) and isinstance(model, nn.Module)
    if not is_single or weights is None or weights.format.bits >= 8:
        return pairs
    return [*pairs[:-1], (_Tables(model), INT8_DYNAMIC if exact else INT8_WEIGHT), pairs[-1]]


def _scheme(selector: object, scheme: object) -> Scheme | None:
    if isinstance(scheme, str):
        return named(scheme)
    if isinstance(scheme, Quantizer):
        return Scheme(None, scheme)
    if scheme is not None and not isinstance(scheme, Scheme):
        raise TypeError(
            f"convert: rules: the scheme for {selector!r} must be a hop.Scheme, its name, a Quantizer of weights or "
            f"None; got {scheme!r}; give one such as 'int8'"
        )
    return scheme


class _Except:
    """Selects all layers that `filter` does not select."""

    def __init__(self, filter: Selector) -> None:
        self.filter = filter

    def __call__(self, name: str, module: nn.Module) -> bool:
        return not matches(self.filter, name, module)

    def __repr__(self) -> str:
        return f"all but filter={self.filter!r}"


class _Tables:
    """Selects embeddings, and layers that share their weights, such as the head of a language model."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {id(m._parameters.get(WEIGHT)) for _, m in modules_of(model) if _is_table(m)} - {id(None)}

    def __call__(self, name: str, module: nn.Module) -> bool:
        return _is_table(module) or id(module._parameters.get(WEIGHT)) in self.weights

    def __repr__(self) -> str:
        return "embeddings"


def _is_table(module: nn.Module) -> bool:
    layer = type(module) if isinstance(module, Layer) else layer_of(module)
    return layer is not None and issubclass(layer, Embedding)


_OPTIONAL = (_Except, _Tables)  # selectors that may match nothing


def _check_matches(model: nn.Module, rules: Sequence[Rule], functions: bool) -> None:
    """Raise ValueError for selectors that match no layer, such as misspelled names or types that do not occur."""
    asks = _asks_for_functions(rules, functions)
    layers = [
        (name, module)
        for name, module in modules_of(model, every_name=True)
        if _is_known(module) or isinstance(module, tuple(LEFT)) or (asks and function_of(module) is not None)
    ]
    asked, matched = set[int](), set[int]()
    for name, module in layers:
        for i, (selector, _) in enumerate(rules):  # function selectors see only real layers that earlier rules left
            is_plain = isinstance(selector, str | type)
            if not is_plain and isinstance(module, tuple(LEFT)):
                continue
            asked.add(i)
            if matches(selector, name, module):
                matched.add(i)
                break
    first = rules[0][0]
    if isinstance(first, _Except) and layers and all(first(name, module) for name, module in layers):
        raise ValueError(
            f"convert: filter={first.filter!r} matches no layer; the layers of the model are {_listed(layers)}; "
            "leave it out, or mend it"
        )
    idle = [
        selector
        for i, (selector, _) in enumerate(rules)
        if i not in matched
        and type(selector) not in _OPTIONAL
        and (
            not any(matches(selector, *layer) for layer in layers)
            if isinstance(selector, str | type)
            else i in asked or not layers
        )
    ]
    if idle:
        raise ValueError(
            f"convert: rules: no layer matches {', '.join(map(repr, idle))}; the layers of the model are "
            f"{_listed(layers)}; leave the rule out, or correct its selector"
        )


def _listed(layers: Sequence[tuple[str, nn.Module]]) -> str:
    return ", ".join(f"{name or '(model)'} ({type(module).__name__})" for name, module in layers) or "none"


def takes(rules: Sequence[Rule], name: str, module: nn.Module) -> bool:
    """Whether `convert` by these rules puts a quantized layer in the place of a module, or changes its scheme."""
    known = isinstance(module, Layer) or layer_of(module) is not None
    return known and _choice(rules, name, module, set())[0] is not None


def layers_taken(model: nn.Module, rules: Sequence[Rule]) -> Iterator[tuple[Layer, Scheme]]:
    """The layers that are quantized already and that `convert` by these rules changes, with their new schemes."""
    for name, module in modules_of(model):
        scheme, _ = _choice(rules, name, module, set())
        if isinstance(module, Layer) and scheme is not None:
            yield module, scheme


def _is_replaced(rules: Sequence[Rule], name: str, module: nn.Module) -> bool:
    """Whether `convert` by these rules puts a quantized layer in the place of a float one."""
    return takes(rules, name, module) and not isinstance(module, Layer)


def _choice(rules: Sequence[Rule], name: str, module: nn.Module, matched: set[int]) -> tuple[Scheme | None, str]:
    """The scheme of the first rule that matches, or the reason why there is none."""
    for i, (selector, scheme) in enumerate(rules):
        if matches(selector, name, module):
            matched.add(i)
            return scheme, "" if scheme is not None else f"the rule for {selector!r} leaves it alone"
    return None, _NO_RULE


def _of_output(attention: nn.Module, scheme: Scheme | None, reason: str) -> tuple[Scheme | None, str]:
    """The scheme of an attention's output projection: that of the attention if no rule matches."""
    if isinstance(attention, MultiheadAttention):
        return (attention.scheme, "") if reason == _NO_RULE else (scheme, reason)
    if isinstance(attention, nn.MultiheadAttention):
        return None, "its attention reads the weight directly, and is left in floats"
    return scheme, reason


def _is_known(module: nn.Module) -> bool:
    """Whether a module is a layer we can convert, or has weights in a Holder, as experts do."""
    return isinstance(module, (*LAYERS, Layer)) or kind_of(module) is not None


def _converted(module: nn.Module, scheme: Scheme, learn_scales: bool) -> nn.Module:
    if isinstance(module, Layer | MultiheadAttention):
        module.scheme = scheme
        return module
    _check_weights(module)
    if kind_of(module) is not None:
        return hold(module, scheme)
    layer = layer_of(module)
    if layer is None:
        raise TypeError(f"{type(module).__name__} is a subclass, which may compute something else")
    return layer.from_float(module, scheme, learn_scales)


def _check_weights(module: nn.Module) -> None:
    """Raise ValueError for a weight that is recomputed in each call, unless by a hook that a layer can keep."""
    keeps_hooks = type(module) in LAYERS and not isinstance(module, nn.MultiheadAttention)
    for each in recomputed(module):
        if each.remove is None or not keeps_hooks:
            raise ValueError(remedied(each))


def has_static_scale(scheme: object) -> bool:
    """Whether a scheme has static scales, which are found once from data."""
    quantizers = (scheme.lhs, scheme.rhs, scheme.output) if isinstance(scheme, Scheme) else ()
    return any(q is not None and q.scale.is_static for q in quantizers)


def _put(model: nn.Module, name: str, new: nn.Module) -> nn.Module:
    """Set the submodule `name` of `model` to `new`, and return the model."""
    if not name:
        return new
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, new)
    return model


def _share_inputs(model: nn.Module) -> None:
    """Let sibling layers that read one input quantize it once."""
    for group in siblings(model):
        layers = [layer for layer in group if isinstance(layer, Linear)]
        if len(layers) > 1:
            share_input(layers)


def _check_before_loading(model: nn.Module) -> None:
    """Check the weights of all layers before the first one is loaded."""
    remove_load_hooks(model, lambda hook: hook is _check_loaded)
    model.register_load_state_dict_pre_hook(_check_loaded)
    after_loading(model, _warn_of_meta)


def _warn_of_meta(model: nn.Module, _: object) -> None:
    """Warn if a model that has its weights cannot run, because buffers that files do not hold are on "meta"."""
    missing = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if missing and not any(p.is_meta for p in model.parameters()):
        warnings.warn(
            f"load_state_dict: the buffers {', '.join(missing[:3])} are on the meta device and in no state_dict, so "
            "the model cannot run; create it under accelerate.init_empty_weights(), which leaves buffers real, or load "
            "it with from_pretrained",
            stacklevel=4,
        )


def _check_loaded(
    model: nn.Module, state_dict: StateDict, prefix: str, local_metadata: Mapping[str, object], *_: object
) -> None:
    assigns = bool(local_metadata.get("assign_to_params_buffers", False))
    names = {module: name for name, module in modules_of(model)}
    for module in names:
        if isinstance(module, Layer):
            owner, own = module.weight_owner()
            key = f"{prefix}{names[owner]}.{own}" if names[owner] else prefix + own
            if key in state_dict:
                module.check_loaded(key, state_dict[key], assigns)


def _unfuse(model: nn.Module) -> None:
    """Make PyTorch's encoders call their layers, because their fused path reads the weights directly."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(isinstance(m, Layer) for m in module.modules()):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder) and any(isinstance(m, Layer) for m in module.modules()):
            module.use_nested_tensor = False
