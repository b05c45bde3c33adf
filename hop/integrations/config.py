"""HopConfig: the quantization of a transformers model, as stored in its config.json."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard, cast

from transformers.quantizers import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from hop.nn.models.attention_rules import checked_attention
from hop.nn.models.conversion import Rules, checked
from hop.nn.models.exact import check_schemes
from hop.numerics.attention_schemes import AttentionScheme
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme
from hop.numerics.spelling import JsonObject

METHOD = "hop"
_FIELDS = ("scheme", "modules_to_not_convert", "pack", "attention", "exact", "input_orders", "weight_quantizers")


class HopConfig(QuantizationConfigMixin):
    """The quantization_config for `from_pretrained` that quantizes weights while they are loaded.

    Linear, Conv1d, Conv2d, Embedding and experts are quantized, as by hop.quantize_; `model.hop_report` lists the
    layers left in floats, with reasons.

    Args:
        scheme: a name, such as "int8" (hop.schemes.named); a hop.Scheme or its text; a hop.Quantizer, for weights only;
            or several by name pattern, such as {"*.mlp.*": "int4", "*": "int8"}, where the first match counts and None
            leaves layers in floats. A single scheme of fewer than 8 bits leaves embeddings, and layers that share their
            weights, at 8 bits, as for hop.quantize_; {"*": scheme} does not. config.json stores the text, so that a
            checkpoint does not depend on the meaning of names.
        modules_to_not_convert: names to leave in floats, matched as in transformers: a module's name, or its beginning
            or end. Default: the output embeddings (lm_head), the last layer, such as a classifier, and modules tied to
            them; [] quantizes these too. Modules tied to one that stays in floats, and modules that the model keeps in
            float32, stay in floats as well. Ignored for a checkpoint that is already quantized.
        pack: whether to pack weights for the kernels of the machine that loads them. Not saved.
        attention: how to multiply query, key and value: a hop.attention_schemes.AttentionScheme, its name, such as
            "int8", or its text. None leaves attention in floats.
        exact: whether the model gives the same bits on every route, as for hop.quantize_; attention is then "int8" by
            default. Layers in floats are refused, so use modules_to_not_convert=[].
        input_orders: names of Linear layers whose checkpoint has an `input_order`, the input feature of each column,
            because columns were sorted by group (`hop.load_model`, for GPTQ's act-order). Only for
            checkpoints with codes; stored in config.json.
        weight_quantizers: quantizers of weights of experts that differ from their scheme's, by the parameter's name.
            Only for checkpoints with codes; stored in config.json as text.

    Raises:
        ValueError: no scheme has this name; the text is not a scheme; or a scheme has delayed scales, or static ones of
            other operands than the input; or exact=True, and results in the scheme depend on more than their inputs.
            `from_pretrained` raises it for static scales of inputs, which need hop.quantize_(model, scheme,
            calibrate=...), unless the checkpoint has them.
        TypeError: an argument has the wrong type.
    """

    def __init__(
        self,
        scheme: Rules,
        *,
        modules_to_not_convert: Sequence[str] | None = None,
        pack: bool = True,
        attention: AttentionScheme | str | None = None,
        exact: bool = False,
        input_orders: Sequence[str] | None = None,
        weight_quantizers: Mapping[str, Quantizer | str] | None = None,
    ) -> None:
        self.quant_method: Any = METHOD
        self.scheme = _scheme_text(scheme)
        if not isinstance(pack, bool):
            raise TypeError(f"HopConfig: pack must be True or False, got {pack!r}")
        if not isinstance(exact, bool):
            raise TypeError(f"HopConfig: exact must be True or False, got {exact!r}")
        self.pack = pack
        self.modules_to_not_convert = _names("modules_to_not_convert", modules_to_not_convert)
        self.input_orders = _names("input_orders", input_orders) or []
        self.weight_quantizers = _quantizer_texts(weight_quantizers)
        attention = "int8" if exact and attention is None else attention
        ((_, attention_scheme),) = checked_attention([("*", _read(attention, AttentionScheme))])
        self.attention = None if attention_scheme is None else str(attention_scheme)
        self.exact = exact
        if exact:
            check_schemes("HopConfig", (scheme for _, scheme in self.rules), [attention_scheme])

    @property
    def rules(self) -> list[tuple[str, Scheme | None]]:
        """The schemes by name pattern, as for hop.nn.convert."""
        pairs: Any = [("*", self.scheme)] if isinstance(self.scheme, str) else self.scheme
        return [(pattern, None if text is None else Scheme.parse(text)) for pattern, text in pairs]

    def with_rules(self, rules: Sequence[tuple[str, Scheme | None]]) -> "HopConfig":
        """Copy the configuration, with other schemes."""
        result = copy.copy(self)
        result.scheme = _scheme_text(rules)
        return result

    def to_dict(self) -> JsonObject:
        """The content of config.json."""
        fields: JsonObject = {
            "quant_method": METHOD,
            "scheme": self.scheme,
            "modules_to_not_convert": self.modules_to_not_convert,
        }
        fields |= {} if self.attention is None else {"attention": self.attention}
        fields |= {"exact": True} if self.exact else {}
        fields |= {"input_orders": self.input_orders} if self.input_orders else {}
        return fields | ({"weight_quantizers": self.weight_quantizers} if self.weight_quantizers else {})

    @classmethod
    def from_dict(  # type: ignore[override]
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> "HopConfig | tuple[HopConfig, dict[str, Any]]":
        """The config that `to_dict` describes. Raises ValueError for an unknown field."""
        fields = {key: value for key, value in config_dict.items() if key != "quant_method"}
        unknown = sorted(fields.keys() - set(_FIELDS))
        if unknown or "scheme" not in fields:
            problem = f"has no field {unknown[0]!r}" if unknown else "needs the field 'scheme'"
            raise ValueError(f"HopConfig: quantization_config {problem}; got {sorted(fields)} of {sorted(_FIELDS)}")
        own = {key: kwargs.pop(key) for key in _FIELDS if key in kwargs}
        config = cls(**{**fields, **own})
        return (config, kwargs) if return_unused_kwargs else config


register_quantization_config(METHOD)(HopConfig)


def _scheme_text(scheme: object) -> str | list[list[str | None]]:
    """The text of a scheme; for several, pairs of a pattern and a text or None, because JSON may sort a mapping."""
    is_one = not isinstance(scheme, Mapping | list | tuple)
    given: Iterable[Any] = [("*", scheme)] if is_one else scheme.items() if isinstance(scheme, Mapping) else scheme
    pairs: list[Any] = [tuple(pair) if isinstance(pair, list) else pair for pair in given]
    rules = checked([(pair[0], _read(pair[1])) if _is_pair(pair) else pair for pair in pairs])
    for selector, rule in rules:
        if not isinstance(selector, str):
            raise TypeError(
                f"HopConfig: scheme: a selector must be a pattern of names, as config.json can hold; got {selector!r}"
            )
        if rule is not None:
            _check(rule)
    texts: list[list[str | None]] = [[cast(str, s), None if rule is None else str(rule)] for s, rule in rules]
    if is_one:
        (_, text), *_ = texts
        if text is None:
            raise TypeError("HopConfig: scheme=None would quantize nothing; leave quantization_config out")
        return text
    return texts


def _is_pair(pair: object) -> TypeGuard[tuple[Any, Any]]:
    return isinstance(pair, tuple) and len(pair) == 2


def _read(scheme: object, kind: type[Scheme | AttentionScheme] = Scheme) -> Any:
    """Parse a scheme's text; anything else is returned unchanged."""
    return kind.parse(scheme) if isinstance(scheme, str) and ":" in scheme else scheme


def _check(scheme: Scheme) -> None:
    for role in ("lhs", "rhs", "output"):
        q = getattr(scheme, role)
        if q is not None and q.scale.missing() is not None and not (role == "lhs" and q.scale.is_static):
            raise _no_data(scheme, role)


def check_without_data(rules: Iterable[tuple[str, Scheme | None]]) -> None:
    """Raise ValueError for a scheme with static scales, which a checkpoint in floats does not have."""
    for _, scheme in rules:
        if scheme is not None and scheme.lhs is not None and scheme.lhs.scale.is_static:
            raise _no_data(scheme, "lhs")


def _no_data(scheme: Scheme, role: str) -> ValueError:
    return ValueError(
        f"HopConfig: scheme={scheme}: {role} has scales that are computed from data (static or delayed), and "
        "there are no data while weights are loaded; load the model in floats and call "
        "hop.quantize_(model, scheme, calibrate=batches), or use a dynamic scheme such as 'int8'"
    )


def _quantizer_texts(given: object) -> dict[str, str]:
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(
            f"HopConfig: weight_quantizers must be a mapping from names to quantizers, or None; got {given!r}"
        )
    pairs = given.items() if given else ()
    if not all(isinstance(name, str) and isinstance(q, Quantizer | str) for name, q in pairs):
        raise TypeError(f"HopConfig: weight_quantizers must have a Quantizer or its text by name, got {given!r}")
    return {name: str(Quantizer.parse(q) if isinstance(q, str) else q) for name, q in pairs}


def _names(argument: str, given: object) -> list[str] | None:
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"HopConfig: {argument} must be a list of names of modules, or None; got {given!r}")
    names = list(given)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"HopConfig: {argument} must be a list of names of modules, got {names!r}")
    return names
