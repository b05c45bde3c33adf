"""Tensors of a folder of safetensors under transformers' names. Experts in matrices of their own become stacks."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hop.impls.quantize import dequantize
from hop.integrations.gguf_tensors import joined
from hop.interchange import Checkpoint
from hop.numerics.spelling import shown

ModelTensor = tuple[str, Tensor, Tensor | None]
"""Name, tensor, and order of its columns."""

# Scales of inputs, outputs, keys and values; stored next to a weight.
_ACTIVATION_SCALES = re.compile(
    r"(.*[._])?(input_scale|input_zero_point|input_global_scale|output_scale|k_scale|v_scale)"
)
_STACKED = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
"""The model_types whose stack gate_up_proj has the rows of an expert's gate before those of its up."""
_EXPERT = re.compile(r"(.*\.experts)\.(0|[1-9]\d{0,4})\.(gate_proj|up_proj|down_proj|w[123])\.weight")
_STACK = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
_OLD = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # names of Mixtral's files

Places = dict[tuple[str, int], str]  # the tensor's name by matrix and number of the expert


def folder_tensors(folder: Path, checkpoint: Checkpoint, model_type: str) -> Iterator[ModelTensor]:
    """The tensors of a model other than scales of activations. Raises ValueError if experts are missing."""
    stacks: dict[str, Places] = {}
    for name in checkpoint:
        if _ACTIVATION_SCALES.fullmatch(name):
            continue
        own = name.replace(".block_sparse_moe.", ".mlp.") if model_type in _STACKED else name
        match = _EXPERT.fullmatch(own) if model_type in _STACKED else None
        if match is None:
            yield own, checkpoint[name], checkpoint.permutation(name)
            continue
        experts, number, matrix = match.groups()
        matrix = _OLD.get(matrix, matrix)
        places = stacks.setdefault(f"{experts}.{_STACK[matrix]}", {})
        if (other := places.setdefault((matrix, int(number)), name)) != name:
            raise ValueError(
                f"load_model: {folder}: {shown(other)} and {shown(name)} are the same matrix of an expert; remove one"
            )
    for name, places in stacks.items():
        yield name, _stacked(folder, checkpoint, name, places), None


def _stacked(folder: Path, checkpoint: Checkpoint, name: str, places: Mapping[tuple[str, int], str]) -> Tensor:
    count = max(number for _, number in places) + 1
    matrices = [matrix for matrix, stack in _STACK.items() if name.endswith(f".{stack}")]
    for matrix in matrices:
        for number in range(count):
            if (matrix, number) not in places:
                raise ValueError(
                    f"load_model: {folder}: {shown(name)} lacks the {matrix} of expert {number}, and has expert "
                    f"{count - 1}; download it again"
                )
    try:
        stacks = [
            joined([_in_order(checkpoint, places[matrix, number]) for number in range(count)], None)
            for matrix in matrices
        ]
        return joined(stacks, 1)
    except RuntimeError as error:
        raise ValueError(
            f"load_model: {folder}: the experts of {shown(name)} do not have the same shape: {shown(error)}; download "
            "it again"
        ) from error


def _in_order(checkpoint: Checkpoint, name: str) -> Tensor:
    """A matrix with the model's order of columns: in floats if the file's is another."""
    tensor, order = checkpoint[name], checkpoint.permutation(name)
    return tensor if order is None else dequantize(tensor, torch.float32)[:, torch.argsort(order)]
