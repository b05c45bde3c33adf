"""Tensors of a GGUF file under transformers' names, in transformers' order of rows and dimensions.

    names        names in the file -> module names in the model, `{}` for the number of a block
    rows         tensors whose rows are permuted: Llama's query and key, GPT-NeoX's query, key and value
    shifted      norms that are stored as 1 + w
    joins        parameters of the model that the file has in several tensors, or in another form: experts, latent keys

Sources: the converters of llama.cpp, which write such files, and the tensor processors of transformers, which read
them.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hop.impls.pack import pack_operator
from hop.impls.quantize import dequantize
from hop.interchange import GGUFFile
from hop.interchange.packed import transposed_stack
from hop.numerics.spelling import shown
from hop.tensor import QuantizedTensor
from hop.tensor.units import of_buffers

Names = Mapping[str, str]


class HeadConfig(Protocol):
    """The configuration of a model, to the extent that orders of rows depend on it."""

    num_attention_heads: int
    num_key_value_heads: int


class Join(NamedTuple):
    """A parameter of the model from tensors of the file."""

    target: str  # the parameter, with `{}` for the number of a block
    combine: Callable[[list[Tensor], HeadConfig], Tensor]  # from the tensors and the configuration


Joins = Mapping[tuple[str, ...], Join]  # by the names of the tensors, complete, with `{}`


# ---- orders of rows


def pairs(name: str, rows: int, config: HeadConfig) -> Tensor | None:
    """The row order of Llama's query and key: rotated pairs are adjacent in the file, and half a head apart in the
    model.
    """
    match = re.search(r"\.attn_([qk])\.", name)
    if match is None:
        return None
    heads = config.num_attention_heads if match.group(1) == "q" else config.num_key_value_heads
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def heads(name: str, rows: int, config: HeadConfig) -> Tensor | None:
    """The row order of GPT-NeoX's query, key and value: one after another in the file, interleaved by head in the
    model.
    """
    if ".attn_qkv." not in name:
        return None
    return torch.arange(rows).view(3, config.num_attention_heads, -1).transpose(0, 1).reshape(-1)


def permute_rows(tensor: Tensor, order: Tensor, dim: int = 0) -> Tensor:
    """tensor.index_select(dim, order), permuting the rows of codes and scales of a quantized tensor."""
    if not isinstance(tensor, QuantizedTensor):
        return tensor.index_select(dim, order)
    units = of_buffers(tensor.quantizer, tensor.usages, tensor.dim())
    buffers = tensor.buffers()
    if any(units[name][dim] not in (1, -1) for name in buffers):
        raise ValueError(f"rows of a tensor by {tensor.quantizer} share scales, and cannot be ordered one by one")
    return tensor.rebuilt(
        {name: b.index_select(dim, order) if units[name][dim] == 1 else b for name, b in buffers.items()}
    )


# ---- parameters from several tensors


def joined(tensors: Sequence[Tensor], dim: int | None) -> Tensor:
    """The tensors one after the other along `dim`, or stacked if it is None: quantized if all are, by one quantizer;
    else floats.
    """
    quantizers = [t.quantizer if isinstance(t, QuantizedTensor) else None for t in tensors]
    if any(q != quantizers[0] for q in quantizers):
        tensors = [dequantize(t, torch.float32) if isinstance(t, QuantizedTensor) else t.float() for t in tensors]
    return torch.stack(list(tensors)) if dim is None else torch.cat(list(tensors), dim)


def rows_after_rows(tensors: list[Tensor], config: HeadConfig) -> Tensor:
    """One matrix of the rows of several."""
    return joined(tensors, 0)


def gate_and_up(tensors: list[Tensor], config: HeadConfig) -> Tensor:
    """The experts' gate and up, (E, R, K) each, as (E, 2 R, K)."""
    return joined(tensors, 1)


def interleaved(tensors: list[Tensor], config: HeadConfig) -> Tensor:
    """Gate and up of GPT-OSS, row by row in turns: (E, R) as (E, 2 R), and (E, R, K) as (E, K, 2 R)."""
    both = joined(tensors, 1)
    both = permute_rows(both, torch.arange(both.shape[1]).view(2, -1).T.reshape(-1), 1)
    return both if both.dim() == 2 else transposed([both], config)


def transposed(tensors: list[Tensor], config: HeadConfig) -> Tensor:
    """(E, R, K) as (E, K, R), with transposed codes and scales; (E, R) unchanged."""
    (stack,) = tensors
    if stack.dim() != 3:
        return stack
    if not isinstance(stack, QuantizedTensor):
        return stack.transpose(1, 2).contiguous()
    return transposed_stack(pack_operator(stack, ""))


def latent_keys_and_values(tensors: list[Tensor], config: HeadConfig) -> Tensor:
    """The keys' (H, rank, k) and values' (H, v, rank) of DeepSeek as (H (k + v), rank), in floats: blocks of the former
    run along another dimension.
    """
    keys, values = (dequantize(t) if isinstance(t, QuantizedTensor) else t.float() for t in tensors)
    return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)


def unsqueezed(tensors: list[Tensor], config: HeadConfig) -> Tensor:
    """A vector as a matrix of one row."""
    return tensors[0].unsqueeze(0)


# ---- all tensors


class Layout(NamedTuple):
    """How the tensors of an architecture become parameters of its model."""

    names: Names
    rows: Callable[[str, int, HeadConfig], Tensor | None] = lambda name, rows, config: None
    shifted: str = "$^"  # pattern of tensor names
    joins: Mapping[tuple[str, ...], Join] = {}


_NO_WEIGHTS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}  # in the configuration


def tensors_of(file: GGUFFile, layout: Layout, config: HeadConfig) -> Iterator[tuple[str, Tensor]]:
    """The tensors by their names in the model, converted to its form.

    Raises ValueError for a tensor that has no place in the model, and for a part of a parameter that is missing.
    """
    first = {parts[0]: parts for parts in layout.joins}
    others = {name for parts in layout.joins for name in parts[1:]}
    for name in file:
        pattern, number = _pattern(name)
        if name in _NO_WEIGHTS:
            continue
        if pattern in first:
            yield _combined(file, first[pattern], number, layout, config)
        elif pattern in others:
            whole = next(parts[0] for parts in layout.joins if pattern in parts).format(number)
            if whole not in file:
                raise _missing(file, whole, name)
        else:
            yield _renamed(file, name, layout.names), _converted(file, name, layout, config)


def _combined(
    file: GGUFFile, parts: tuple[str, ...], number: str, layout: Layout, config: HeadConfig
) -> tuple[str, Tensor]:
    join, names = layout.joins[parts], [part.format(number) for part in parts]
    for name in names:
        if name not in file:
            raise _missing(file, name, names[0])
    try:
        tensor = join.combine([file[name] for name in names], config)
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(f"{shown(name)} of {file.shape(name)}" for name in names)
        raise ValueError(
            f"load_model: {file.path}: tensors {shapes} do not fit together; convert the model again"
        ) from error
    return join.target.format(number), tensor


def _missing(file: GGUFFile, name: str, present: str) -> ValueError:
    return ValueError(
        f"load_model: {file.path} has tensor {shown(present)} and no {shown(name)}; the model is incomplete"
    )


def _converted(file: GGUFFile, name: str, layout: Layout, config: HeadConfig) -> Tensor:
    tensor = file[name]
    order = layout.rows(name, tensor.shape[0], config) if tensor.dim() else None
    if order is not None:
        tensor = permute_rows(tensor, order)
    return tensor - 1 if re.search(layout.shifted, name) else tensor


def _pattern(name: str) -> tuple[str, str]:
    """A name with `{}` for the number of its block, and the number."""
    match = re.match(r"blk\.(\d+)\.", name)
    return (name, "") if match is None else (f"blk.{{}}.{name[match.end() :]}", match.group(1))


def _renamed(file: GGUFFile, name: str, names: Names) -> str:
    pattern, number = _pattern(name)
    base, _, end = pattern.rpartition(".")
    if base in names:
        return f"{names[base].format(number)}.{end}"
    if pattern in names:  # a parameter that is not called weight or bias
        return names[pattern].format(number)
    raise ValueError(f"load_model: {file.path}: tensor {shown(name)} has no place in the model; leave it out")
