"""The tasks of examples/distributed.py: the networks and data of digits.py and finetune_minilm.py."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hop
from hop import recipes, schemes

HELD_OUT = 128  # sentences

Batch = tuple[tuple[Tensor, ...], Tensor]  # model inputs and classes


@dataclass
class Task:
    """A training task.

    Args:
        schemes: by name, for the layers of the submodule `body`; None for floats.
        start: the initial float model.
        groups: names of modules whose weights are gathered together; all other weights form another group.
        optimizer: from a copy of the model.
        batches: of all steps.
    """

    name: str
    schemes: dict[str, hop.Scheme | None]
    start: nn.Module
    body: str
    groups: list[str]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batches: list[Batch]
    held_out: Batch


def digits_task(steps: int) -> Task:
    import digits  # each task needs packages of its own

    training, test = digits.load()
    generator, batches = torch.Generator().manual_seed(0), []
    while len(batches) < steps:  # skip the smaller last batch of an epoch, which processes could not share equally
        batches += [((x,), y) for x, y in training.batches(generator) if len(y) == digits.BATCH]
    torch.manual_seed(0)
    start = digits.Net()
    digits.train(start, training, 5, seed=0)  # static scales of an untrained network would soon be too small
    return Task(
        "digits",
        {"float32": None, "INT8_STATIC": schemes.INT8_STATIC, "FP8_HYBRID": recipes.FP8_HYBRID},
        start,
        "",
        ["first", "second", "last"],
        lambda model: torch.optim.AdamW(model.parameters(), lr=digits.RATE, weight_decay=digits.DECAY),
        batches[:steps],
        ((test.pixels,), test.digits),
    )


def minilm_task(steps: int) -> Task:
    import finetune_minilm as finetune

    model, training, held_out = finetune.load()
    found = training.endless(finetune.BATCH)
    return Task(
        "minilm",
        {"float32": None, "INT8_DYNAMIC": schemes.INT8_DYNAMIC, "FP8_HYBRID": recipes.FP8_HYBRID},
        model,
        "embed",
        [f"embed.bert.encoder.layer.{i}" for i in range(6)],
        finetune.optimizer,
        [next(found) for _ in range(steps)],
        ((held_out.ids[:HELD_OUT], held_out.mask[:HELD_OUT]), held_out.labels[:HELD_OUT]),
    )


TASKS = {"digits": digits_task, "minilm": minilm_task}
"""Functions of the number of steps."""
