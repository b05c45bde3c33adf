"""Distillation: train a quantized model on the outputs of the float one.

    teacher = teacher_of(model)                                 # of the float model, or of the converted one
    loss = distillation_loss(model(x), teacher(x))              # in each step

Hinton et al. 2015, "Distilling the Knowledge in a Neural Network" (arXiv 1503.02531).
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hop.compat.pytree import tree_leaves
from hop.nn.layers.base import Layer, modules_of, not_a_model
from hop.tensor import QuantizedTensor


class _Teacher(nn.Module):
    """A model that stays in eval mode, without gradients, even if a parent module is switched to training."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        super().train(False)

    def train(self, mode: bool = True) -> Any:
        return self

    def forward(self, *args: object, **kwargs: object) -> Any:
        with torch.no_grad():
            return self.model(*args, **kwargs)


def teacher_of(model: nn.Module) -> nn.Module:
    """Return a snapshot of the model in floats for a quantized model to imitate: quantized layers become float ones.

    It shares every Parameter of `model` that is not trained (requires_grad=False), and copies the others and all
    buffers. It stays in eval mode, and its outputs have no gradients.

    Args:
        model: the float model, or one that hop.nn.convert returned. Not a frozen one, whose weights are codes.

    Raises:
        TypeError: model is not a module.
        ValueError: a layer is frozen, or has a batch norm folded in.
    """
    if not isinstance(model, nn.Module):
        raise not_a_model("teacher_of", model)
    for name, module in modules_of(model):
        if isinstance(module, Layer) and (module.frozen or module.norm is not None):
            why = "is frozen, and its weight is codes" if module.frozen else "has a batch norm folded in"
            raise ValueError(f"teacher_of: layer {name!r} {why}; call teacher_of before")
    shared: dict[int, object] = {id(p): p for p in model.parameters() if not p.requires_grad}
    result = copy.deepcopy(model, shared)
    for name, module in list(modules_of(result, every_name=True)):
        if isinstance(module, Layer):
            floats = module.to_float()
            path, _, attribute = name.rpartition(".")
            if not name:
                result = floats
            else:
                setattr(result.get_submodule(path), attribute, floats)
    for parameter in result.parameters():
        if parameter.requires_grad:
            parameter.requires_grad_(False)
    return _Teacher(result)


def distillation_loss(student: object, teacher: object, temperature: float | None = None) -> Tensor:
    """The distance between the outputs of a student and of its teacher.

    Args:
        student, teacher: outputs of the two models, trees with floating-point tensors of the same shapes; other leaves
            are ignored.
        temperature: T, for logits (..., classes): T² times the mean Kullback-Leibler divergence of softmax(student / T)
            from softmax(teacher / T). None for the mean squared error over all elements.

    Returns:
        A scalar float32 tensor, differentiable with respect to `student` only.

    Raises:
        ValueError: the shapes differ, there are no floating-point tensors, or temperature is not above 0 and finite.
    """
    if temperature is not None and not (isinstance(temperature, int | float) and 0 < temperature < float("inf")):
        raise ValueError(f"distillation_loss: temperature must be above 0 and finite, got {temperature!r}; give 2.0")
    ours, theirs = _floats(student), _floats(teacher)
    if not ours or [t.shape for t in ours] != [t.shape for t in theirs]:
        raise ValueError(
            f"distillation_loss: student and teacher must have floating-point tensors of the same shapes, got "
            f"{[tuple(t.shape) for t in ours]} and {[tuple(t.shape) for t in theirs]}; give outputs for one input"
        )
    parts: list[Tensor] = []
    for a, b in zip(ours, theirs, strict=True):
        a, b = a.to(torch.float32), b.detach().to(torch.float32)
        if temperature is None:
            parts.append((a - b).square().flatten())
            continue
        log_p, log_q = (torch.log_softmax(t / temperature, -1) for t in (b, a))
        parts.append((temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1)).flatten())
    return torch.cat(parts).mean()


def _floats(outputs: object) -> Sequence[Tensor]:
    return [
        t
        for t in tree_leaves(outputs)
        if isinstance(t, Tensor) and not isinstance(t, QuantizedTensor) and t.is_floating_point()
    ]
