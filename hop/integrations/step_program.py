"""The compiled program of a decode step, from disk or compiled now: a package per part, or one for the whole step."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hop.compat.export import without_stack_traces
from hop.compat.packages import Package, compile_package
from hop.integrations import kept_programs
from hop.integrations.decode_pieces import After, Before, Layer, planned
from hop.integrations.decode_program import NumberIsUsed, Step, examples, share_codes, tensors_of, traceable


class StepProgram:
    """The packages of a step. A step that does not divide is one package, `before`.

    Args:
        before: of the inputs, flattened: the hidden states and the shared tensors, or the logits.
        layers: a package per layer, and the indices in the pool that it takes after the hidden states.
        after: of the hidden states and the inputs: the logits.
    """

    def __init__(
        self, before: Package, layers: Sequence[tuple[Package, list[int]]] = (), after: Package | None = None
    ) -> None:
        self.before, self.layers, self.after = before, layers, after

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the program reads and writes."""
        packages = [self.before, *(package for package, _ in self.layers), *([self.after] if self.after else [])]
        return [tensor for package in packages for tensor in package.tensors.values()]

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Sequence[Tensor], seen: Sequence[Tensor]) -> Tensor:
        """The logits, as Step.forward returns them."""
        inputs = [tokens, positions, *slots, *seen]
        hidden, *shared = self.before(*inputs)
        pool = [*inputs, *shared]
        for package, uses in self.layers:
            (hidden,) = package(hidden, *[pool[i] for i in uses])
        return hidden if self.after is None else self.after(hidden, *inputs)[0]


def step_program(step: Step, batch: int, most: int, folder: str | Path | None) -> StepProgram:
    """The program of a step for `batch` sequences of at most `most` tokens; `folder` as for compile_decode.

    Raises:
        ValueError: the step cannot be traced as one program for all positions.
    """
    name = kept_programs.digest(step, (batch, most))
    if name is not None and kept_programs.is_lasting(step):
        return _named(step, batch, most, kept_programs.folder(folder), name)
    with tempfile.TemporaryDirectory() as here:  # no later process would find it
        if name is None:  # it depends on hooks, which no name describes
            return _whole(step, batch, most, Path(here, "step.pt2"))
        return _named(step, batch, most, Path(here), name)


def _named(step: Step, batch: int, most: int, folder: Path, name: str) -> StepProgram:
    """The program from `folder`, compiled into it if needed: in parts, or as one package called `name`."""
    return _divided(step, batch, most, folder) or _whole(step, batch, most, folder / f"{name}.pt2")


def _whole(step: Step, batch: int, most: int, path: Path) -> StepProgram:
    inputs, masks = examples(step, batch, most)
    shapes = (None, None, [None] * len(masks), masks)
    return StepProgram(_package(path, step, lambda: _exported(step, inputs, shapes, step.model)))


def _divided(step: Step, batch: int, most: int, folder: Path) -> StepProgram | None:
    """The program in parts; None if the step does not divide, or a layer computes with its number."""
    inputs, masks = examples(step, batch, most)
    plan, other = planned(step, inputs), planned(step, examples(step, batch, most, less=1)[0])
    if plan is None or other is None or plan.calls != other.calls:
        return None
    shapes = (None, None, [None] * len(masks), masks)
    pool_shapes = [None, None, *shapes[2], *masks]
    pool_shapes += [_changing(a, b) for a, b in zip(plan.pool, other.pool, strict=True)][len(pool_shapes) :]
    forms = [(t.dtype, tuple(t.shape)) for t in (plan.hidden, *plan.pool)]
    slots = {kind: 2 + i for i, kind in enumerate(step.sizes)}

    def package(part: Before | Layer | After, given: Sequence[object], dynamic: object) -> Package:
        name = kept_programs.digest(part, (batch, most, part.settings(), forms), ignored=("layer_idx",))
        return _package(folder / f"{name}.pt2", part, lambda: _exported(part, given, dynamic, step.model))

    layers: list[tuple[Package, list[int]]] = []
    try:
        for i, (cache, kind) in enumerate(zip(step.caches, step.kinds, strict=True)):
            layer = Layer(plan, i, cache, slots[kind], slots[kind] + len(masks))
            given = (plan.hidden, *(plan.pool[i] for i in layer.uses))
            layers.append((package(layer, given, (None, tuple(pool_shapes[i] for i in layer.uses))), layer.uses))
    except NumberIsUsed:
        return None
    before = package(Before(step, plan), inputs, (shapes,))
    return StepProgram(before, layers, package(After(step, plan), (plan.hidden, *inputs), (None, shapes)))


def _exported(module: nn.Module, inputs: Sequence[Any], shapes: Any, model: object) -> Any:
    """Export a step or a part of it."""
    with traceable(model):
        return torch.export.export(module, tuple(inputs), dynamic_shapes=shapes, strict=False)


def _changing(a: Tensor, b: Tensor) -> dict[int, Any] | None:
    """The dimensions in which two tensors differ, as torch.export takes them."""
    sizes = enumerate(zip(a.shape, b.shape, strict=True))
    return {i: torch.export.Dim.AUTO for i, (m, n) in sizes if m != n} or None


def _package(path: Path, module: nn.Module, program: Callable[[], Any]) -> Package:
    """The package at `path`, compiled from `program()` if it does not exist, with the tensors of `module`."""
    tensors = tensors_of(module)
    if not path.exists():
        with without_stack_traces():
            made = program()
            if others := sorted(name for name in made.constants if name not in tensors):
                raise ValueError(
                    f"compile_decode: the model creates constant tensors in its forward ({others}), which are not part "
                    "of a module; make them buffers"
                )
            compile_package(made, path, share_codes, precompile_headers=not isinstance(module, Step))
    return Package(path, tensors)
