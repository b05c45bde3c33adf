"""Parse operators and their arguments from words of a command line. Nothing is evaluated.

int8:128x256             a tensor of a dtype, with random values
INT8_ROW:128x256         random floats, quantized with a preset of hop.presets
float32:                 a tensor without dimensions
int8:256x128.t           a 256x128 tensor, transposed; .pack: packed by hop.pack; .channels_last
1  0.5  true  none  [1,1]     numbers, booleans, None and lists
stride=[2,2]             any of these as a keyword argument
"""

import difflib
import json
import re

import torch
import typer
from torch import Tensor

import hop
from hop import QuantizedTensor, Quantizer, presets
from hop.compat.eager import OpOverload
from hop.numerics.spelling import JsonObject

_SHORT = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
_DTYPES = {name: x for name, x in vars(torch).items() if isinstance(x, torch.dtype)} | _SHORT
_OPERATOR = re.compile(r"([a-z_]\w*)\.([a-z_]\w*)(?:\.(\w+))?", re.IGNORECASE | re.ASCII)
_TENSOR = re.compile(r"(\w+):(|\d+(?:x\d+)*)((?:\.\w+)*)", re.ASCII)
_NAMED = re.compile(r"([a-z_]\w*)=(.+)", re.IGNORECASE | re.ASCII)
_MODIFIERS = ("t", "pack", "channels_last")
_WORDS = {"none": None, "true": True, "false": False}


def operator(text: str) -> OpOverload:
    """An operator of torch.ops, spelled aten.mm.default, or aten.mm if its overload is the default one."""
    match = _OPERATOR.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not an operator; spell it as aten.linear.default", param_hint="OP")
    namespace, name, overload = match.groups()
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    overloads = [] if packet is None or not hasattr(packet, "overloads") else packet.overloads()
    result = getattr(packet, overload or "default", None) if (overload or "default") in overloads else None
    if not isinstance(result, OpOverload):
        known = f"; take one of {', '.join(overloads)}" if overloads else "; spell it as aten.linear.default"
        raise typer.BadParameter(f"torch.ops has no operator {text}{known}", param_hint="OP")
    return result


def output(text: str) -> torch.dtype | Quantizer:
    """Parse an operator's output: a dtype or a preset."""
    result = _kind(text)
    if result is None:
        raise _unknown(text, "OUTPUT")
    return result


def values(words: list[str], device: torch.device) -> tuple[list[object], JsonObject]:
    """Parse positional and keyword arguments; tensors are created on `device`."""
    args: list[object] = []
    kwargs: dict[str, object] = {}
    for word in words:
        if (match := _NAMED.fullmatch(word)) is not None:
            kwargs[match[1]] = _value(match[2], device)
        elif kwargs:
            raise typer.BadParameter(f"{word!r} follows a named argument; put it before", param_hint="ARG")
        else:
            args.append(_value(word, device))
    return args, kwargs


def described(x: object) -> str:
    """Format a value roughly as the command line spells it."""
    if isinstance(x, QuantizedTensor):
        name = next((n for n, q in presets.PRESETS.items() if q == x.quantizer), str(x.quantizer))
        return f"{name}:{'x'.join(map(str, x.shape))}"
    return f"{_name(x.dtype)}:{'x'.join(map(str, x.shape))}" if isinstance(x, Tensor) else str(x)


def _value(word: str, device: torch.device) -> object:
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if (match := _TENSOR.fullmatch(word)) is not None:
        return _tensor(*match.groups(), device=device)
    if (dtype := _DTYPES.get(word)) is not None:
        return dtype
    try:
        result = json.loads(word)
    except ValueError:
        result = word
    if isinstance(result, str | dict):
        raise typer.BadParameter(
            f"{word!r} is not an argument; spell tensors as int8:128x256 or INT8_ROW:128x256, and numbers and lists as "
            "1 or [1,1]",
            param_hint="ARG",
        )
    return result


def _tensor(name: str, sizes: str, modifiers: str, *, device: torch.device) -> Tensor:
    kind, asked = _kind(name), modifiers.split(".")[1:]
    if kind is None:
        raise _unknown(name, "ARG")
    shape = [int(n) for n in sizes.split("x")] if sizes else []
    if unknown := [m for m in asked if m not in _MODIFIERS]:
        raise typer.BadParameter(
            f"{unknown[0]!r} must be one of {', '.join(_MODIFIERS)}; take one of them", param_hint="ARG"
        )
    x = _random(shape, torch.float32 if isinstance(kind, Quantizer) else kind, device)
    if "channels_last" in asked:
        x = x.to(memory_format=torch.channels_last)
    if isinstance(kind, Quantizer):
        x = hop.quantize(kind, x, **static_arguments(kind, device))
    x = hop.pack(x) if "pack" in asked else x
    return x.transpose(-2, -1) if "t" in asked else x


def _random(shape: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        positive = torch.rand(shape, device=device) + 0.5  # usable as scales too
        return positive.to(dtype)
    if dtype == torch.bool:
        return torch.randint(2, shape, device=device, dtype=torch.int8).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(max(info.min, -128), min(info.max, 127) + 1, shape, device=device, dtype=dtype)


def static_arguments(q: Quantizer, device: torch.device) -> JsonObject:
    """The scale and zero point arguments for a quantizer with static scales; empty for others."""
    if not q.scale.is_static:
        return {}
    result = {"scale": torch.ones((), device=device)}
    if q.scale.has_zero_point():
        result["zero_point"] = torch.zeros((), device=device, dtype=q.format.dtype)
    return result


def _kind(name: str) -> torch.dtype | Quantizer | None:
    return _DTYPES.get(name, presets.PRESETS.get(name.upper()))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unknown(name: str, where: str) -> typer.BadParameter:
    near = difflib.get_close_matches(name.upper(), presets.PRESETS, n=3) or difflib.get_close_matches(
        name, _DTYPES, n=3
    )
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return typer.BadParameter(
        f"{name!r} is neither a dtype of torch, such as int8 or bf16, nor a preset; run hop formats --presets for "
        f"all{hint}",
        param_hint=where,
    )
