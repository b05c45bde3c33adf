"""Read GPTQ and AWQ weights: transposed, integers of 2, 3, 4 or 8 bits in 32-bit words.

    GPTQ    qweight (K · bits / 32, N), qzeros (groups, N · bits / 32), scales (groups, N), g_idx (K,)
    AWQ     qweight (K, N / 8), qzeros (groups, N / 8), scales (groups, N): the packing of its gemm kernel
            qweight (N, K / 8), qzeros (N, words), scales (N, 8 words): that of its gemv kernel
    llm-awq qweight int16 (N / 4, K), scales and scaled_zeros (groups and padding, N): tiles of 4 rows of 64 codes

x ≈ (code - zero point) · scale, with the group from g_idx, or in the order of columns if there is none; in llm-awq
code · scale + scaled zero. Zero points in GPTQ's first form are stored minus 1; those of symmetric codes are
2^(bits - 1) in every form. Sources: AutoGPTQ's and GPTQModel's qlinear modules, AutoAWQ's packing_utils, llm-awq's
qmodule.
"""

import json
from typing import Any

import torch
from torch import Tensor

from hop.interchange.packed import (
    FLOATS,
    Config,
    Parts,
    Weight,
    assemble_rows,
    integer_quantizer,
    number,
    offset_quantizer,
    sorting_permutation,
    unpack_words,
)
from hop.interchange.patterns import matches
from hop.numerics.spelling import shown

_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # a 1 in each field of a word
_MOST_RULES = 256
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # positions of AWQ's columns in a word
_TILE = (4, 64)  # rows and columns of llm-awq that are stored together


def read_gptq(parts: Parts, config: Config) -> Weight:
    config = _of_module(parts, config)
    bits = number(parts, config, "bits", 2, 8)
    if bits not in (2, 3, 4, 8):
        raise parts.fail(f"the configuration's bits are {bits}, and must be 2, 3, 4 or 8")
    words = parts.get("qweight", torch.int32, ndim=2)
    size, rows = 32 * words.shape[0] // bits, words.shape[1]
    if size * bits != 32 * words.shape[0]:
        raise parts.fail(f"'qweight' has {words.shape[0]} rows of words, which is not a multiple of {bits}")
    group, scales = _scales(parts, config, rows, size)
    zero = parts.get("qzeros", torch.int32, ndim=2)
    zero = parts.fits("qzeros", zero, (scales.shape[0], -(-rows * bits // 32)))
    zeros = _zero_points(parts, config, zero, bits, rows)
    order = sorting_permutation(parts, "g_idx", size, group) if parts.has("g_idx") else None

    def codes(start: int, stop: int) -> Tensor:
        values = unpack_words(words[:, start:stop].t(), bits, size)
        return values if order is None else values[:, order]

    return _built(bits, group, codes, scales, zeros, size, order)


def read_auto_round(parts: Parts, config: Config) -> Weight:
    """Read auto-round's weights, in the packing of GPTQ or AWQ that the configuration names, by its settings for the
    module.
    """
    packing: Any = config.get("packing_format", "")
    extra: Any = config.get("extra_config") or {}
    if not isinstance(packing, str) or not isinstance(extra, dict):
        raise parts.fail("the configuration's packing_format must be text, and its extra_config an object")
    fields: Any = extra.get(parts.name.removesuffix(".weight"), {})
    own = {**config, **(fields if isinstance(fields, dict) else {})}
    if "awq" in packing:
        return read_awq(parts, {**own, "version": "gemm", "zero_point": own.get("sym") is not True})
    if "gptq" not in packing and own.get("sym") is not True:
        raise parts.fail(
            f"the configuration's packing_format is {shown(packing)}, whose zero points are known for symmetric codes "
            "alone; export it as 'auto_round:auto_gptq'"
        )
    return read_gptq(parts, {**own, "checkpoint_format": "gptq" if own.get("sym") is not True else None})


def _of_module(parts: Parts, config: Config) -> Config:
    """The configuration for one weight: with the fields of the first of GPTQModel's `dynamic` rules that matches its
    module.
    """
    rules: Any = config.get("dynamic")
    if rules is None:
        return config
    if not isinstance(rules, dict) or len(rules) > _MOST_RULES:
        raise parts.fail(f"the configuration's dynamic must be an object with at most {_MOST_RULES} rules")
    name = parts.name.removesuffix(".weight")
    for pattern, fields in rules.items():
        try:
            if not matches(pattern.removeprefix("+:").removeprefix("-:"), name):
                continue
        except ValueError as error:
            raise parts.fail(f"a rule of the configuration's dynamic cannot be matched: {error}") from error
        if pattern.startswith("-:"):
            raise parts.fail(f"the configuration's dynamic rule {shown(pattern)} leaves it in floats, and it has codes")
        if not isinstance(fields, dict):
            raise parts.fail(f"the configuration's dynamic rule {shown(pattern)} must be an object")
        return {**config, **fields}
    return config


def _zero_points(parts: Parts, config: Config, words: Tensor, bits: int, rows: int) -> Tensor:
    """(groups, N) zero points, from the configuration's form and symmetry and the stored values."""
    form, stored = _form(parts, config), unpack_words(words, bits, rows)
    if (middle := _middle(parts, config, form, stored, bits)) is not None:
        return torch.full_like(stored, middle)
    if form == "gptq_v2":
        return stored
    if bits in _ONES:  # adding 1 per field carries into the next field, undoing the borrow of the stored subtraction
        return unpack_words(_sum(words, _ONES[bits]), bits, rows)
    if "gptqmodel" in json.dumps(config.get("meta"), default=str).lower():
        raise parts.fail(
            "zero points of 3 bits in the form 'gptq' by gptqmodel are not those of AutoGPTQ; save it as 'gptq_v2'"
        )
    return (stored + 1) & (2**bits - 1)


def _form(parts: Parts, config: Config) -> str | None:
    """ "gptq", which stores zero points minus 1, or "gptq_v2"; None if the configuration names neither."""
    named = {key: config[key] for key in ("checkpoint_format", "format") if config.get(key) is not None}
    for key, form in named.items():
        if form not in ("gptq", "gptq_v2"):
            raise parts.fail(f"the configuration's {key} is {shown(form)}, and must be 'gptq' or 'gptq_v2'")
    forms = list(dict.fromkeys(named.values()))
    if len(forms) > 1:
        raise parts.fail(
            f"the configuration's checkpoint_format is {forms[0]!r} and its format {forms[1]!r}; remove the wrong one"
        )
    return forms[0] if forms else None


def _middle(parts: Parts, config: Config, form: str | None, stored: Tensor, bits: int) -> int | None:
    """The zero point of symmetric codes, 2^(bits - 1), which all have; None for codes that are not symmetric.

    Both forms are in use for symmetric codes, and some files name the wrong one. Stored values tell which it is: one
    less than the middle in the form "gptq", the middle in "gptq_v2"."""
    sym: Any = config.get("sym")
    if sym is not None and not isinstance(sym, bool):
        raise parts.fail(f"the configuration's sym is {shown(sym)}, and must be true or false")
    middle = 2 ** (bits - 1)
    first, last = (int(x) for x in stored.aminmax()) if stored.numel() else (middle, middle)
    found = {middle - 1: "gptq", middle: "gptq_v2"}.get(first) if first == last else None
    if sym is False or (sym is None and found is None):
        return None
    if found is None:
        raise parts.fail(
            f"the configuration's sym is true, and 'qzeros' has values from {first} to {last}, where symmetric codes "
            f"have {middle - 1} (checkpoint_format 'gptq') or {middle} ('gptq_v2') alone; set sym to false if they are "
            "not symmetric"
        )
    if stored.numel() and form not in (None, found):
        raise parts.fail(
            f"the configuration's checkpoint_format is {form!r}, and 'qzeros' has {first} alone, the middle of {bits} "
            f"bits in the form {found!r}; set checkpoint_format to {found!r} if the codes are symmetric, or sym to "
            "false if they are not"
        )
    return middle


def _sum(words: Tensor, ones: int) -> Tensor:
    """words + ones modulo 2^32."""
    return (words.to(torch.int64) + ones).to(torch.int32)


def read_awq(parts: Parts, config: Config) -> Weight:
    version: Any = config.get("version", "gemm")
    kind = version.lower() if isinstance(version, str) else None
    if number(parts, config, "bits", 4, 4, 4) != 4 or kind not in ("gemm", "gemv"):
        raise parts.fail(f"the configuration's version is {shown(version)}, and must be 'gemm' or 'gemv'")
    if kind == "gemv":
        return _read_gemv(parts, config)
    words = parts.get("qweight", torch.int32, ndim=2)
    size, rows = words.shape[0], 8 * words.shape[1]
    group, scales = _scales(parts, config, rows, size)
    if parts.has("qzeros"):
        zero = parts.get("qzeros", torch.int32, ndim=2)
        zeros = _columns(parts.fits("qzeros", zero, (scales.shape[0], words.shape[1])))
        if config.get("zero_point") is False and bool((zeros != 8).any()):
            raise parts.fail(
                "the configuration's zero_point is false, and 'qzeros' has others than 8; set it to true if the codes "
                "are not symmetric"
            )
    elif config.get("zero_point"):
        raise parts.fail(
            "the file lacks its 'qzeros', and the configuration's zero_point is true; set it to false if the "
            "codes are symmetric"
        )
    else:
        zeros = torch.full(scales.shape, 8, dtype=torch.uint8)

    def codes(start: int, stop: int) -> Tensor:
        first, last = start // 8, -(-stop // 8)
        return _columns(words[:, first:last])[:, start - 8 * first : stop - 8 * first].t().contiguous()

    return _built(4, group, codes, scales, zeros, size, None)


def _read_gemv(parts: Parts, config: Config) -> Weight:
    """Read AWQ's packing for its gemv kernel: rows of codes, and scales and zero points of each row, with padding."""
    words = parts.get("qweight", torch.int32, ndim=2)
    rows, size = words.shape[0], 8 * words.shape[1]
    group = _group(parts, config, size)
    count = -(-size // max(group, 1))
    zeros, scales = parts.get("qzeros", torch.int32, ndim=2), parts.get("scales", *FLOATS, ndim=2)
    width = zeros.shape[1]
    if 8 * width < count or zeros.shape[0] != rows:
        raise parts.fail(f"'qzeros' has shape {tuple(zeros.shape)}, and must have {rows} rows of {count} zero points")
    scales = parts.fits("scales", scales, (rows, 8 * width))[:, :count]
    zero = unpack_words(zeros, 4, count)

    def codes(start: int, stop: int) -> Tensor:
        return unpack_words(words[start:stop], 4, size)

    return _built(4, group, codes, scales.t(), zero.t(), size, None)


def read_llm_awq(parts: Parts, config: Config) -> Weight:
    """Read llm-awq's packing: a tile of 4 rows and 64 columns has its rows one after the other, and each row 32 columns
    at a time in the order of the kernel's registers.
    """
    number(parts, config, "w_bit" if "w_bit" in config else "bits", 4, 4, 4)
    words = parts.get("qweight", torch.int16, ndim=2)
    rows, size = _TILE[0] * words.shape[0], words.shape[1]
    if size % _TILE[1]:
        raise parts.fail(f"'qweight' has {size} columns, and must have a multiple of {_TILE[1]}")
    group = _group(parts, config, size)
    if size % group:
        raise parts.fail(f"the configuration's group_size is {group}, and must divide the {size} columns")
    scales, zeros = (parts.get(end, *FLOATS, ndim=2) for end in ("scales", "scaled_zeros"))
    count = size // group
    if scales.shape[0] < count or scales.shape[1] != rows:
        raise parts.fail(f"'scales' has shape {tuple(scales.shape)}, and must have ({count} or more, {rows})")
    zeros = parts.fits("scaled_zeros", zeros, scales.shape)
    block = (1, -1 if group == size else group)

    def codes(start: int, stop: int) -> Tensor:
        first, last = start // _TILE[0], -(-stop // _TILE[0])
        raw = words[first:last].contiguous().view(torch.uint8)
        nibbles = torch.stack([raw & 15, raw >> 4], 2).view(last - first, -1, *_TILE)
        # Column 8 b + 2 a + c of 32 is stored at 8 a + 4 c + b.
        columns = nibbles.unflatten(3, (2, 4, 2, 4)).permute(0, 2, 1, 3, 6, 4, 5)
        return columns.reshape(-1, size)[start - _TILE[0] * first : stop - _TILE[0] * first]

    scale, offset = scales[:count].t(), -zeros[:count].t()
    q = offset_quantizer(block)
    return Weight(assemble_rows(q, (rows, size), scales.dtype, codes, scale=scale, offset=offset))


def _columns(words: Tensor) -> Tensor:
    """Unpack (m, w) words into (m, 8 w) codes in the order of columns."""
    return unpack_words(words, 4, 8 * words.shape[1]).unflatten(1, (-1, 8))[:, :, _PLACES].flatten(1)


def _scales(parts: Parts, config: Config, rows: int, size: int) -> tuple[int, Tensor]:
    """The group size and the scales, (groups, N)."""
    group = _group(parts, config, size)
    scales = parts.get("scales", *FLOATS, ndim=2)
    return group, parts.fits("scales", scales, (-(-size // max(group, 1)), rows))


def _group(parts: Parts, config: Config, size: int) -> int:
    """The columns of a group, of `size` in all."""
    given = number(parts, config, "group_size" if "group_size" in config else "q_group_size", -1, 2**31 - 1)
    return size if given <= 0 else min(given, size)


def _built(bits: int, group: int, codes: Any, scales: Tensor, zeros: Tensor, size: int, order: Tensor | None) -> Weight:
    q = integer_quantizer(bits, (1, -1 if group == size else group), affine=True)
    shape = (scales.shape[1], size)
    return Weight(assemble_rows(q, shape, scales.dtype, codes, scale=scales.t(), zero_point=zeros.t()), order)
