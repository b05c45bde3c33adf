"""Small files of every reader, and what is done to them: bytes that flip, sizes that no file has, parts that are gone.

A mutation is drawn from a number, so that one that fails can be made again.
"""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hop
from hop import formats, presets, scale_rules
from hop.interchange import gguf_quantizer, save_compressed_tensors, save_gguf
from hop.interchange.float_checkpoints import NF4

Files = dict[str, bytes]
HEADER, CONFIG, GGUF = "model.safetensors", "config.json", "model.gguf"
WORDS = (0, 1, 255, 2**31 - 1, 2**31, 2**32 - 1, 10**9, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
VALUES: tuple[Any, ...] = (*WORDS, -1, -(2**31), -(2**63), 0.5, 1e308, float("nan"), "", "x", "gptq", None, True, False)
VALUES += ([], {}, [1], [[]], {"a": 1}, ["torch.float32"], "torch.float8_e4m3fn", 3, 4, 5, 8, 32, 128, "a" * 300)
DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I64", "I32", "I16", "I8", "U8", "BOOL")
SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


# ---- files


def _compressed(folder: Path) -> None:
    affine, nvfp4 = (
        scale_rules.MinMax(),
        scale_rules.StoredScales(formats.E4M3, outer=(-1, -1), outer_dtype=torch.float32, divided=True),
    )
    quantizers = [
        presets.INT4_32,
        hop.Quantizer(formats.UINT4, (1, 32), affine),
        hop.Quantizer(formats.INT3, (1, -1)),
        presets.INT8_ROW_AFFINE,
        presets.FP8_ROW,
        hop.Quantizer(formats.E4M3, (16, 16), scale_rules.CurrentScaling()),
        hop.Quantizer(formats.E2M1, (1, 16), nvfp4),
        presets.MXFP4,
        presets.MXFP8,
    ]
    tensors = {f"{i}.weight": hop.quantize(q, torch.randn(16, 64)) for i, q in enumerate(quantizers)}
    save_compressed_tensors(folder, {**tensors, "norm.weight": torch.ones(3)})


def _gptq(folder: Path) -> None:
    order = torch.arange(64).remainder(2).to(torch.int32)
    tensors = {"qweight": words(8, 16), "qzeros": words(2, 2), "scales": torch.rand(2, 16).half(), "g_idx": order}
    _save(folder, {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}, tensors)


def _gptq_3(folder: Path) -> None:
    tensors = {"qweight": words(6, 32), "qzeros": words(1, 3), "scales": torch.rand(1, 32)}
    _save(folder, {"quant_method": "gptq", "bits": 3, "group_size": -1, "checkpoint_format": "gptq_v2"}, tensors)


def _awq(folder: Path) -> None:
    tensors = {"qweight": words(64, 2), "qzeros": words(2, 2), "scales": torch.rand(2, 16).half()}
    _save(folder, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, tensors)


def _llm_awq(folder: Path) -> None:
    tensors = {
        "qweight": torch.randint(-(2**15), 2**15, (3, 64), dtype=torch.int16),
        "scales": torch.rand(8, 12).half(),
    }
    tensors["scaled_zeros"] = -torch.rand(8, 12).half()
    _save(folder, {"quant_method": "awq", "w_bit": 4, "q_group_size": 32}, tensors)


def _fp8(folder: Path) -> None:
    tensors = {"weight": torch.randn(40, 48).to(torch.float8_e4m3fn), "weight_scale_inv": torch.rand(3, 2)}
    _save(folder, {"quant_method": "fp8", "weight_block_size": [16, 32]}, tensors)


def _modelopt(folder: Path) -> None:
    scale = torch.rand(8, 4).to(torch.float8_e4m3fn)
    weight = torch.randint(0, 256, (8, 32), dtype=torch.uint8)
    tensors = {"weight": weight, "weight_scale": scale, "weight_scale_2": torch.tensor(0.1)}
    _save(folder, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, tensors)


def _modelopt_experts(folder: Path) -> None:
    tensors = {"up": torch.randint(0, 256, (2, 16, 12), dtype=torch.uint8), "up_weight_scale_2": torch.rand(2)}
    tensors |= {"up_weight_scale": torch.rand(2, 2, 12).to(torch.float8_e4m3fn), "down_weight_scale": torch.rand(2)}
    tensors["down"] = torch.randn(2, 12, 16).to(torch.float8_e4m3fn)
    _save(folder, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, tensors)


def _mxfp4(folder: Path) -> None:
    tensors = {"up_blocks": torch.randint(0, 256, (2, 4, 3, 16), dtype=torch.uint8)}
    tensors["up_scales"] = torch.randint(90, 130, (2, 4, 3), dtype=torch.uint8)
    _save(folder, {"quant_method": "mxfp4"}, tensors)


def _nf4(folder: Path) -> None:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [8, 32], "nested_blocksize": 2}
    raw = json.dumps(state | {"nested_offset": 0.1, "nested_dtype": "float32"}).encode()
    tensors = {
        "weight": torch.randint(0, 256, (128, 1), dtype=torch.uint8),
        "weight.absmax": torch.randint(0, 256, (4,), dtype=torch.uint8),
        "weight.quant_map": torch.tensor(NF4.book),
        "weight.nested_absmax": torch.rand(2),
        "weight.nested_quant_map": torch.rand(256),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(raw), dtype=torch.uint8),
    }
    _save(folder, {"quant_method": "bitsandbytes", "load_in_4bit": True}, tensors)


def _int8(folder: Path) -> None:
    tensors = {"weight": torch.randint(-127, 128, (8, 16), dtype=torch.int8), "SCB": torch.rand(8)}
    tensors["weight_format"] = torch.tensor(0, dtype=torch.uint8)
    _save(folder, {"quant_method": "bitsandbytes"}, tensors)


def _save(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Save a weight and a plain tensor."""
    save_compressed_tensors(folder, {**{f"a.{name}": t for name, t in tensors.items()}, "a.bias": torch.ones(3)})
    (folder / CONFIG).write_text(json.dumps({"model_type": "llama", "quantization_config": config}))


def _gguf(folder: Path) -> None:
    names = ("Q4_0", "Q5_1", "Q8_0", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "TQ2_0", "MXFP4", "NVFP4")
    tensors = {f"blk.{i}.w": hop.quantize(gguf_quantizer(n), torch.randn(2, 256)) for i, n in enumerate(names)}
    metadata = {"general.architecture": "llama", "names": ["a", "bc"], "n": 7, "lists": [[1], [2, 3]], "x": 0.5}
    save_gguf(folder / GGUF, {**tensors, "norm": torch.ones(3), "bytes": torch.ones(2, 3, dtype=torch.int8)}, metadata)


MADE: dict[str, Callable[[Path], None]] = {
    "gguf": _gguf,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "gptq 3 bits": _gptq_3,
    "awq": _awq,
    "llm-awq": _llm_awq,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "modelopt experts": _modelopt_experts,
    "mxfp4": _mxfp4,
    "nf4": _nf4,
    "int8": _int8,
}


def made(kind: str, folder: Path) -> Files:
    """The small files of a reader."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        MADE[kind](folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# ---- mutations


def mutated(files: Files, seed: int) -> Files:
    """The files with one to three changes, of which some go through the forms that a reader checks first."""
    rng, changed = random.Random(seed), dict(files)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([name for name in changed for _ in range(1 if name == CONFIG else 2)])
        kinds = {HEADER: (_bytes, _header, _header), CONFIG: (_bytes, _config, _config)}.get(name, (_bytes, _words))
        changed[name] = rng.choice(kinds)(rng, changed[name])
    return changed


def _bytes(rng: random.Random, content: bytes) -> bytes:
    """Bytes and bits changed, words of extreme sizes written, parts removed or repeated, the end cut off."""
    changed = bytearray(content)
    if not changed:
        return content
    at = rng.randrange(len(changed) if rng.random() < 0.5 else min(len(changed), 400))
    kind, size = rng.randrange(6), rng.randint(1, 40)
    if kind == 0:
        changed[at] = rng.randrange(256)
    elif kind == 1:
        changed[at] ^= 1 << rng.randrange(8)
    elif kind == 2:
        changed[at : at + 8] = struct.pack("<Q", rng.choice(WORDS))
    elif kind == 3:
        del changed[at : at + size]
    elif kind == 4:
        changed[at:at] = changed[at : at + size]
    else:
        del changed[at:]
    return bytes(changed)


def _words(rng: random.Random, content: bytes) -> bytes:
    """A word of 4 or 8 bytes in the header of a GGUF file, where such words lie at any place."""
    changed, at = bytearray(content), rng.randrange(min(len(content), 1100) or 1)
    if rng.random() < 0.5:
        changed[at : at + 8] = struct.pack("<Q", rng.choice(WORDS))
    else:
        changed[at : at + 4] = struct.pack(
            "<I", rng.choice((0, 1, 2, 6, 8, 9, 12, 13, 14, 16, 39, 40, 77, 2**31, 2**32 - 1))
        )
    return bytes(changed)


def _header(rng: random.Random, content: bytes) -> bytes:
    """A header of safetensors, with other entries."""
    size = int.from_bytes(content[:8], "little")
    try:
        header: Any = json.loads(content[8 : 8 + size])
        names = [name for name in header if name != "__metadata__"]
        _entry(rng, header, rng.choice(names), rng.choice(names))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):  # of an earlier change
        return _bytes(rng, content)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def _entry(rng: random.Random, header: Any, name: str, other: str) -> None:
    """An entry in the same bytes with another dtype or shape, so that only our readers can object; or one that no file
    has; or gone, renamed, or in another's place."""
    entry, kind = header[name], rng.randrange(9)
    count = entry["data_offsets"][1] - entry["data_offsets"][0]
    if kind < 3:
        entry["dtype"] = rng.choice(DTYPES)
        left = count // SIZES.get(entry["dtype"], 1)
        first = rng.choice([n for n in (1, 2, 3, 4, 8, 16, 32, 64) if left % n == 0])
        entry["shape"] = rng.choice([[left], [first, left // first], [left // first, first], [1, first, left // first]])
    elif kind == 3:
        entry["shape"] = rng.choice(
            [entry["shape"][::-1], [*entry["shape"], 1], [1, *entry["shape"]], entry["shape"][1:]]
        )
    elif kind == 4:
        entry[rng.choice(["dtype", "shape", "data_offsets"])] = rng.choice(VALUES)
    elif kind == 5:
        held = entry[rng.choice(["shape", "data_offsets"])]
        held[rng.randrange(len(held))] = rng.choice(VALUES)
    elif kind == 6:
        header[name], header[other] = header[other], header[name]
    elif kind == 7:
        header[rng.choice([f"{name}_scale", name[:-1], other, "weight", ""])] = header.pop(name)
    else:
        del header[name]


def _config(rng: random.Random, content: bytes) -> bytes:
    """A configuration with another value at some place, or without it."""
    try:
        held: Any = json.loads(content)
        place, key = _place(rng, held)
        if rng.random() < 0.2:
            del place[key]
        else:
            place[key] = rng.choice(VALUES)
    except (ValueError, LookupError, TypeError):
        return _bytes(rng, content)
    return json.dumps(held).encode()


def _place(rng: random.Random, held: Any) -> tuple[Any, Any]:
    """Some object or list in another, and a key of it."""
    key = rng.choice(list(held) if isinstance(held, dict) else range(len(held)))
    inner = held[key]
    return _place(rng, inner) if isinstance(inner, dict | list) and inner and rng.random() < 0.85 else (held, key)
