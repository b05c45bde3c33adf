"""Convert frozen values to text and back: the form of a quantizer in graphs, files and error messages.

    text    = "hop1:" value
    value   = Name "(" [field "=" value {", " field "=" value}] ")"     a dataclass, without default fields
            | name                                                      a constant, such as e4m3
            | "torch." name                                             a dtype
            | number | "inf" | "nan" | string | "True" | "False" | "None"
            | "(" [value {", " value}] [","] ")"                        a tuple

Only registered classes and constants can be read, and nothing is evaluated: each class validates its fields when it is
created. A text has at most 2^16 characters, and values are nested at most 32 deep, so that reading takes bounded time.
"""

import dataclasses
import functools
import importlib
import json
import math
import pkgutil
import re
from typing import Any, TypeAlias, TypeVar

import torch
from typing_extensions import Self

from hop.compat.patches import REFUSED
from hop.compat.values import register_value

_T = TypeVar("_T")
JsonObject: TypeAlias = dict[str, Any]
"""A parsed JSON object, or keys and values to write as one."""

VERSION = 1
_PREFIX = f"hop{VERSION}:"
_classes: dict[str, type] = {}
_constants: dict[str, object] = {}
EARLIER = {"Given": "Static"}  # classes by their names in files that were written before they were renamed
_TOKEN = re.compile(
    r"\s*(?:(?P<number>-?(?:\d+\.?\d*(?:e[+-]?\d+)?|inf\b|nan\b))|(?P<dtype>torch\.\w+)|(?P<name>[A-Za-z_][\w.<>]*)"
    r"|(?P<string>\"(?:[^\"\\]|\\.)*\")|(?P<mark>[(),=]))"
)
_DEEPEST = 32
_LONGEST_TEXT = 2**16  # characters; our longest texts, codebooks of 256 numbers, have a quarter of that
_LONGEST = 120  # characters of a value in a message
_LONGEST_PART = 80  # characters quoted around a position
_LONGEST_MESSAGE = 600  # characters of a class's error about its fields
_DEEPEST_JSON = 64  # nesting of lists and objects
_DTYPES = {name: x for name, x in vars(torch).items() if isinstance(x, torch.dtype)}
_LARGEST = torch.finfo(torch.float32).max
_WORDS = {"True": True, "False": False, "None": None}


class Value:
    """Base class of frozen dataclasses that consist of their fields only.

    Values with equal fields are equal and have one text; they are constants of compiled programs, and are pickled as
    text. Classes of this package are spelled by name, others by module and name. A subclass that is not itself a
    dataclass, and so does not declare its fields, has no text and is equal only to itself.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        is_ours = cls.__module__.split(".")[0] == __name__.split(".")[0]
        _classes[cls.__name__ if is_ours else f"{cls.__module__}.{cls.__qualname__}"] = cls
        register_value(cls)

    @functools.cached_property
    def _text(self) -> str:
        if not declares_fields(type(self)):
            raise TypeError(
                f"{type(self).__name__} does not declare its fields, so it has no textual form and is equal only to "
                "itself: decorate the class with @dataclass(frozen=True)"
            )
        return _PREFIX + _spelled(self, type(self).__name__)

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return self._text.removeprefix(_PREFIX) if declares_fields(type(self)) else object.__repr__(self)

    def __eq__(self, other: object) -> bool:
        if self is other or type(self) is not type(other) or not declares_fields(type(self)):
            return self is other
        return self._text == other._text  # type: ignore[attr-defined]

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._text) if declares_fields(type(self)) else id(self)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> str | tuple[object, ...]:
        return (read, (self._text,)) if declares_fields(type(self)) else super().__reduce__()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        """The value itself, which never changes. Dynamo's guards then compare the quantizer of a weight by identity."""
        return self

    def __fx_repr__(self) -> tuple[str, JsonObject]:
        return f"hop_value({self._text!r})", {"hop_value": read}


REFUSED.append(Value)


def declares_fields(cls: type) -> bool:
    """Whether `cls` itself is a dataclass, not only a subclass of one."""
    return "__dataclass_fields__" in cls.__dict__


def register_constant(name: str, value: object) -> None:
    """Spell values equal to `value` as `name`."""
    _constants[name] = value


@functools.cache
def _import_all() -> None:
    """Import every module of this package, including those that `import hop` skips, such as integer functions."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)


def read(text: str, expected: type = Value) -> Any:
    """The value that `text` spells, an instance of `expected`. Raises ValueError with the position of an error."""
    return _Parser(text).read(expected)


def dtype(name: str) -> torch.dtype:
    """The dtype spelled as "torch.float32" or similar. Raises ValueError for anything else."""
    result = _DTYPES.get(name.removeprefix("torch.")) if isinstance(name, str) else None
    if result is None:
        raise ValueError(f"{shown(name)} is not a dtype")
    return result


def _spelled(value: object, where: str) -> str:
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return repr(value + 0.0)  # 0.0 and -0.0 are equal, and equal values have one text
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, tuple):
        inner = ", ".join(_spelled(v, f"{where}[{i}]") for i, v in enumerate(value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    name = next((n for n, cls in _classes.items() if cls is type(value) and declares_fields(cls)), None)
    if name is None:
        raise TypeError(
            f"{where} is {type(value).__name__}, which has no textual form: a quantizer's fields are numbers, strings, "
            "dtypes, tuples, formats and rules; tensors and process groups belong to the module that uses it"
        )
    constant = next((n for n, c in _constants.items() if type(c) is type(value) and _fields(c) == _fields(value)), None)
    if constant is not None:
        return constant
    assert dataclasses.is_dataclass(value)
    shown = []
    for f in dataclasses.fields(value):
        value_of = getattr(value, f.name)
        if f.init and not (
            f.default is not dataclasses.MISSING and type(value_of) is type(f.default) and value_of == f.default
        ):
            shown.append(f"{f.name}={_spelled(value_of, f'{where}.{f.name}')}")
    return f"{name}({', '.join(shown)})"


def _fields(value: object) -> list[object]:
    assert dataclasses.is_dataclass(value)
    return [getattr(value, f.name) for f in dataclasses.fields(value) if f.init]


class _Parser:
    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, got {shown(text)}; give what str(quantizer) spells")
        self.text, self.at, self.depth = text, 0, 0

    def read(self, expected: type[_T]) -> _T:
        if not self.text.startswith(_PREFIX):
            raise self.error(
                f"text: expected {_PREFIX!r}, the version that this library reads; give what str(quantizer) spells"
            )
        self.at = len(_PREFIX)
        start = self.at
        if len(self.text) > _LONGEST_TEXT:
            raise self.error(f"text has {len(self.text)} characters, more than {_LONGEST_TEXT}")
        value = self.value()
        if self.text[self.at :].strip():
            raise self.error("expected the end")
        if not isinstance(value, expected):
            self.at = start
            raise self.error(f"expected a {expected.__name__}, got a {type(value).__name__}")
        return value

    def error(self, message: str) -> ValueError:
        start = max(self.at - _LONGEST_PART // 2, 0) if len(self.text) > _LONGEST_PART else 0
        part = self.text[start : start + _LONGEST_PART]
        before, after = "…" * (start > 0), "…" * (start + len(part) < len(self.text))
        return ValueError(f"position {self.at} of {before}{part!r}{after}: {message}")

    def token(self) -> tuple[str, str]:
        match = _TOKEN.match(self.text, self.at)
        if match is None:
            raise self.error("expected a value")
        self.at = match.end()
        return str(match.lastgroup), match[str(match.lastgroup)]

    def next_is(self, mark: str) -> bool:
        """Skip `mark` if it comes next, and return whether it does."""
        before = self.at
        if _TOKEN.match(self.text, self.at) and self.token() == ("mark", mark):
            return True
        self.at = before
        return False

    def need(self, mark: str) -> None:
        if not self.next_is(mark):
            raise self.error(f"expected {mark!r}")

    def value(self) -> object:
        """Read the next value. Nesting is limited, so that no text exhausts the stack."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise self.error(f"values are nested more than {_DEEPEST} deep")
        try:
            return self.one_value()
        finally:
            self.depth -= 1

    def one_value(self) -> object:
        before = self.at
        kind, word = self.token()
        word = EARLIER.get(word, word) if kind == "name" else word
        if kind == "number":
            return self.number(word, before)
        if kind == "string":
            return self.string(word, before)
        if kind == "dtype":
            try:
                return dtype(word)
            except ValueError as error:
                self.at = before
                raise self.error(str(error)) from error
        if word == "(":
            return self.tuple()
        if kind == "name" and word in _WORDS:
            return _WORDS[word]
        if kind == "name" and word not in _classes and word not in _constants:
            _import_all()
        if kind == "name" and word in _classes and declares_fields(_classes[word]):
            return self.instance(_classes[word], before)
        if kind == "name" and word in _constants:
            return _constants[word]
        self.at = before
        known = [name for name in (*_constants, *_classes) if not name.startswith(("_", "Fast"))]
        raise self.error(f"{shown(word)} is not a known value; known are {', '.join(known)}")

    def number(self, word: str, before: int) -> int | float:
        try:
            return int(word) if re.fullmatch(r"-?\d+", word) else float(word)
        except ValueError as error:  # Python limits the digits of an int
            self.at = before
            raise self.error(str(error)) from error

    def string(self, word: str, before: int) -> str:
        try:
            return json.loads(word)
        except ValueError as error:
            self.at = before
            raise self.error(str(error)) from error

    def tuple(self) -> tuple[object, ...]:
        items = []
        while not self.next_is(")"):
            items.append(self.value())
            if not self.next_is(","):
                self.need(")")
                break
        return tuple(items)

    def instance(self, cls: type, before: int) -> object:
        fields: dict[str, object] = {}
        known = [f.name for f in dataclasses.fields(cls) if f.init]
        self.need("(")
        while not self.next_is(")"):
            at = self.at
            kind, name = self.token()
            if kind != "name" or name not in known or name in fields:
                self.at = at
                rule = "is given twice" if name in fields else f"is not a field of {cls.__name__}: {', '.join(known)}"
                raise self.error(f"{shown(name)} {rule}")
            self.need("=")
            fields[name] = self.value()
            if not self.next_is(","):
                self.need(")")
                break
        try:
            return cls(**fields)
        except (TypeError, ValueError, OverflowError) as error:
            self.at, message = before, str(error)
            if len(message) > _LONGEST_MESSAGE:  # it may quote a name, or many fields
                message = f"{message[:_LONGEST_PART]}… …{message[-_LONGEST:]}"
            raise self.error(message) from error


def real(value: object, what: str) -> float:
    """Return `value` as a float if it is a number that float32 can represent, else raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise ValueError(
            f"{what} must be a finite number within float32's range; got {shown(value)}; give such a number"
        )
    return float(value)


def flag(value: object, what: str) -> None:
    """Raise ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be True or False, got {shown(value)}; give one of them")


def integer(value: object, what: str) -> None:
    """Raise ValueError unless `value` is an integer of at most 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise ValueError(f"{what} must be an integer, got {shown(value)}; give such a number")


def finite(value: object, what: str) -> float:
    """Return `value` as a float if it is finite and not negative, else raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{what} must be a finite number, 0 or more; got {shown(value)}; give such a number")
    return float(value)


def shown(value: object) -> str:
    """Describe a value in a message: a tensor by dtype, shape and device, others by their repr, shortened if long."""
    if isinstance(value, torch.Tensor):
        # FakeTensors too: the same message when traced
        kind = "QuantizedTensor" if hasattr(value, "quantizer") else "tensor"
        return f"a {kind} of {value.dtype} and shape {tuple(value.shape)} on {value.device}"
    many: list[object] = value if isinstance(value, list) else []
    if any(isinstance(x, torch.Tensor) for x in many):
        return f"[{', '.join(shown(x) if isinstance(x, torch.Tensor) else repr(x) for x in many)}]"
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # an integer with thousands of digits, deeply nested lists
        return f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def similar(name: str, known: list[str]) -> list[str]:
    """Up to three of the known names that begin and end like `name`, or all of them. Unlike difflib, Dynamo can trace
    it."""

    def alike(other: str) -> int:
        return _common(name, other) + _common(name[::-1], other[::-1])

    return [k for k in sorted(known, key=lambda k: -alike(k))[:3] if alike(k) >= 2] or known


def _common(a: str, b: str) -> int:
    """The length of the common beginning."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def from_json(text: bytes | str, what: str) -> JsonObject:
    """Parse a JSON object, or raise ValueError naming `what` it is.

    Nesting is limited, so that code which recurses over the result cannot overflow the stack.
    """
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a JSON object")
    level: list[Any] = [value]
    for _ in range(_DEEPEST_JSON):
        inside = (x.values() if isinstance(x, dict) else x for x in level)
        level = [x for values in inside for x in values if isinstance(x, dict | list)]
        if not level:
            return value
    raise ValueError(f"{what} has lists and objects nested more than {_DEEPEST_JSON} deep")
