"""The config.json of a transformers folder: the class that it names, its model without memory, and checks of the sizes
that it implies.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from hop.numerics.spelling import JsonObject, from_json, shown

_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_encoder_layers", "num_decoder_layers")
_COUNTS += ("encoder_layers", "decoder_layers", "num_experts", "num_local_experts", "n_routed_experts")
_FRACTIONS = ("partial_rotary_factor", "rotary_pct")  # fractions of a head's elements that are rotated
_MOST_LABELS = 2**16  # labels of a classifier; transformers creates a name for each


_M = TypeVar("_M", bound=nn.Module)


def read_config(caller: str, folder: Path) -> JsonObject:
    """The content of config.json.

    Raises FileNotFoundError if there is none, and ValueError if it is not a JSON object.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{caller}: {folder} has no config.json; give a folder that transformers saved")
    return from_json(file.read_bytes(), f"{caller}: {file}")


def check_numbers(caller: str, folder: Path, config: Mapping[str, object], tensors: int) -> None:
    """Raise ValueError if the configuration implies implausible sizes: more layers or experts than the folder has
    `tensors`, more labels than any classifier, or more rotated dimensions than a head has.
    """
    for key, value in _fields(config):
        if key in _FRACTIONS:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise _wrong(caller, folder, key, value, "a number above 0 and at most 1")
        elif (key in _COUNTS or key == "num_labels") and value is not None:
            most = _MOST_LABELS if key == "num_labels" else tensors
            if type(value) is not int or not 0 <= value <= most:
                raise _wrong(caller, folder, key, value, f"an integer up to {most}")


def transformers_config(caller: str, folder: Path) -> Any:
    """The configuration as transformers reads it. Raises ValueError if it refuses a value."""
    try:
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (StrictDataclassError, RuntimeError, TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise ValueError(f"{caller}: {folder}: transformers cannot read config.json: {shown(error)}") from error


def on_meta(caller: str, place: Path, cls: Callable[..., _M], config: object, options: Mapping[str, object]) -> _M:
    """The model by its configuration, without memory. Raises ValueError if its sizes are impossible."""
    try:
        with torch.device("meta"):
            return cls(config, **options)
    except (RuntimeError, TypeError, ValueError, KeyError, ArithmeticError, AssertionError) as error:
        raise ValueError(f"{caller}: {place}: cannot create a model from its configuration: {shown(error)}") from error


def model_class(config: object, name: object) -> Any:
    """The class called `name` in the modeling file that belongs to the configuration; None if it is not there.

    Other names would make transformers import other modules.
    """
    place = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    cls = vars(place).get(name) if isinstance(name, str) else None
    return cls if isinstance(cls, type) else None


def _fields(value: object) -> Iterator[tuple[str, object]]:
    """The keys and values of an object and of the objects nested in it."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield key, inner
        yield from _fields(inner)


def _wrong(caller: str, folder: Path, key: str, value: object, rule: str) -> ValueError:
    return ValueError(
        f"{caller}: {folder}: {key} of config.json must be {rule}, got {shown(value)}; download the folder again"
    )
