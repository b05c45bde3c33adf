"""config.json of a folder of transformers: which class it names, and what transformers would make by its numbers."""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from hop.numerics.spelling import from_json, shown

_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_encoder_layers", "num_decoder_layers")
_COUNTS += ("encoder_layers", "decoder_layers", "num_experts", "num_local_experts", "n_routed_experts")
_FRACTIONS = ("partial_rotary_factor", "rotary_pct")  # of the numbers of a head that are rotated
_MOST_LABELS = 2**16  # of a classifier, for each of which transformers makes a name


def described(caller: str, folder: Path) -> dict[str, Any]:
    """What config.json holds.

    Raises FileNotFoundError where there is none, and ValueError for what is no object of JSON."""
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{caller}: {folder} has no config.json; give a folder that transformers saved")
    return from_json(file.read_bytes(), f"{caller}: {file}")


def check_numbers(caller: str, folder: Path, config: Mapping[str, Any], tensors: int) -> None:
    """Raise ValueError for numbers by which transformers would make more layers or experts than a folder of so many
    `tensors` has, more labels than any classifier, or more rotated dimensions than a head has."""
    for key, value in _fields(config):
        if key in _FRACTIONS:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise _wrong(caller, folder, key, value, "a number above 0 and at most 1")
        elif (key in _COUNTS or key == "num_labels") and value is not None:
            most = _MOST_LABELS if key == "num_labels" else tensors
            if type(value) is not int or not 0 <= value <= most:
                raise _wrong(caller, folder, key, value, f"an integer up to {most}")


def model_class(config: Any, name: Any) -> Any:
    """The class called `name`, of those that the file of a configuration's kind of models defines; None for others,
    which transformers would import where it is asked for them."""
    place = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    found = vars(place).get(name) if isinstance(name, str) else None
    return found if isinstance(found, type) else None


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """The keys and values of objects in objects."""
    for key, inner in cast("dict[str, Any]", value).items() if isinstance(value, dict) else ():
        yield key, inner
        yield from _fields(inner)


def _wrong(caller: str, folder: Path, key: str, value: Any, rule: str) -> ValueError:
    return ValueError(
        f"{caller}: {folder}: {key} of config.json must be {rule}, got {shown(value)}; download the folder again"
    )
