"""HopConfig: how a model of transformers is quantized, in its config.json."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from transformers.quantizers import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from hop.nn.attention_rules import checked_attention
from hop.nn.conversion import Rules, checked
from hop.nn.exact import check_schemes
from hop.numerics.attention_schemes import AttentionScheme
from hop.numerics.schemes import Scheme

METHOD = "hop"
_FIELDS = ("scheme", "modules_to_not_convert", "pack", "attention", "exact", "input_orders")


class HopConfig(QuantizationConfigMixin):
    """The quantization_config of `from_pretrained` that quantizes weights while they are read.

    Linear, Conv1d, Conv2d, Embedding and experts are quantized, as hop.quantize_ does; what it left in floats, and why,
    is in `model.hop_report`.

    Args:
        scheme: a name, such as "int8" (hop.schemes.named); a hop.Scheme or its text; a hop.Quantizer, for weights
            alone; or several by patterns of names, such as {"*.mlp.*": "int4", "*": "int8"}, None to leave layers in
            floats, of which the first that matches counts. config.json holds the text, so that a checkpoint means the
            same whatever a name means later.
        modules_to_not_convert: names that stay in floats, as transformers matches them: the name of a module, its
            beginning or its end. None for the output embeddings (lm_head), the last layer, such as a classifier, and
            what is tied to them; [] quantizes these too. What is tied to one that stays in floats does as well, and so
            do modules that the model itself keeps in float32. A checkpoint that was quantized says by itself what is in
            floats.
        pack: whether weights are laid out for the kernels of the machine that loads. It is not saved.
        attention: how query, key and value are multiplied: a hop.attention_schemes.AttentionScheme, its name, such as
            "int8", or its text. None leaves attention in floats.
        exact: whether the model gives the same bits on every route, as hop.quantize_ says; attention=None is "int8"
            then. Layers in floats are refused, so give modules_to_not_convert=[].
        input_orders: names of Linear layers whose checkpoint has an `input_order` beside the weight: the feature that
            each column is for, where columns were sorted by group (`hop.integrations.load_model`, of GPTQ's act-order).
            For checkpoints of codes; config.json holds it.

    Raises:
        ValueError: no scheme has this name; the text spells none; or a scheme has scales that are not found in each
            call, for which hop.quantize_(model, scheme, calibrate=...) is there; or exact=True, and results in the
            scheme depend on more than their inputs.
        TypeError: an argument is of another type.
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
    ) -> None:
        self.quant_method: Any = METHOD
        self.scheme = _spelled(scheme)
        if not isinstance(pack, bool):
            raise TypeError(f"HopConfig: pack must be True or False, got {pack!r}")
        if not isinstance(exact, bool):
            raise TypeError(f"HopConfig: exact must be True or False, got {exact!r}")
        self.pack = pack
        self.modules_to_not_convert = _names("modules_to_not_convert", modules_to_not_convert)
        self.input_orders = _names("input_orders", input_orders) or []
        attention = "int8" if exact and attention is None else attention
        ((_, of_attention),) = checked_attention([("*", _read(attention, AttentionScheme))])
        self.attention = None if of_attention is None else str(of_attention)
        self.exact = exact
        if exact:
            check_schemes("HopConfig", (scheme for _, scheme in self.rules), [of_attention])

    @property
    def rules(self) -> list[tuple[str, Scheme | None]]:
        """The schemes by patterns of names, as hop.nn.convert takes them."""
        pairs: Any = [("*", self.scheme)] if isinstance(self.scheme, str) else self.scheme
        return [(pattern, None if text is None else Scheme.parse(text)) for pattern, text in pairs]

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds."""
        fields: dict[str, Any] = {
            "quant_method": METHOD,
            "scheme": self.scheme,
            "modules_to_not_convert": self.modules_to_not_convert,
        }
        fields |= {} if self.attention is None else {"attention": self.attention}
        fields |= {"exact": True} if self.exact else {}
        return fields | ({"input_orders": self.input_orders} if self.input_orders else {})

    @classmethod
    def from_dict(  # type: ignore[override]
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """The config that `to_dict` gave. Raises ValueError for a field that it does not have."""
        fields = {key: value for key, value in config_dict.items() if key != "quant_method"}
        unknown = sorted(fields.keys() - set(_FIELDS))
        if unknown or "scheme" not in fields:
            said = f"has no field {unknown[0]!r}" if unknown else "needs the field 'scheme'"
            raise ValueError(f"HopConfig: quantization_config {said}; got {sorted(fields)} of {sorted(_FIELDS)}")
        own = {key: kwargs.pop(key) for key in _FIELDS if key in kwargs}
        config = cls(**{**fields, **own})
        return (config, kwargs) if return_unused_kwargs else config


register_quantization_config(METHOD)(HopConfig)


def _spelled(scheme: Any) -> str | list[list[str | None]]:
    """A scheme as its text; several as pairs of a pattern and a text or None, since JSON may sort a mapping."""
    is_one = not isinstance(scheme, Mapping | list | tuple)
    given: Any = [("*", scheme)] if is_one else scheme.items() if isinstance(scheme, Mapping) else scheme
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


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(cast(tuple[Any, ...], pair)) == 2


def _read(scheme: Any, kind: type[Scheme | AttentionScheme] = Scheme) -> Any:
    """A spelled scheme as the scheme; all else as it is."""
    return kind.parse(scheme) if isinstance(scheme, str) and ":" in scheme else scheme


def _check(scheme: Scheme) -> None:
    for role in ("lhs", "rhs", "output"):
        q = getattr(scheme, role)
        if q is not None and q.scale.missing() is not None:
            raise ValueError(
                f"HopConfig: scheme={scheme}: {role} has scales that are found from data (static or delayed), of which "
                "there are none while weights are loaded; load the model in floats and call "
                "hop.quantize_(model, scheme, calibrate=batches), or take a dynamic scheme such as 'int8'"
            )


def _names(argument: str, given: Any) -> list[str] | None:
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"HopConfig: {argument} must be a list of names of modules, or None; got {given!r}")
    names = list(cast(Sequence[Any], given))
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"HopConfig: {argument} must be a list of names of modules, got {names!r}")
    return names
