"""Train two networks with AdamW whose states are floats, 8 bits or 4 bits, over the same batches, and compare.

python examples/optimizers.py [--task NAME] [--steps N] [--seeds N] [--output FILE.json]

The networks and data are those of digits.py and finetune_minilm.py; all weights are trained, including embeddings. For
each seed, which determines the initial weights and the order of batches, each optimizer trains a copy. Another float32
run starts with weights perturbed by 1e-6: its deviation from the first shows the effect of rounding alone.

Ends with exit code 1 if a claim of docs/optimizers.md does not hold.
"""

import argparse
import copy
import functools
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import json_rows, require
from torch import Tensor, nn
from torch.nn import functional

import hop
from hop import optim


def float32(params: Any, *, min_numel: int, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **options)


FLOAT, MOVED = "float32", "float32, moved"
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    FLOAT: float32,
    MOVED: float32,
    "AdamW8bit": optim.AdamW8bit,
    "AdamWFp8": optim.AdamWFp8,
    "BITS8_FP8": functools.partial(optim.AdamW, state=optim.BITS8_FP8),
    "AdamW4bit": optim.AdamW4bit,
}
ALLOWED = {
    "digits": {"AdamW8bit": 0.05, "AdamWFp8": 0.05, "BITS8_FP8": 0.05},
    "minilm": {"AdamW8bit": 0.01, "AdamWFp8": 0.01, "BITS8_FP8": 0.01, "AdamW4bit": 0.05},
}
"""The allowed relative difference of the final loss, a mean over seeds, from float32's; others are not checked."""

MOVE = 1e-6  # relative perturbation of each weight
LAST = 50  # the final loss is the mean over this many last steps


# ---- tasks


@dataclass(frozen=True)
class Task:
    """A training task.

    Args:
        steps: number of training steps.
        start: the initial model of a seed.
        optimizer: from a model and a kind in OPTIMIZERS.
        rate: the fraction of the full learning rate in a step.
        clip: gradients are clipped to this norm.
        batches: the endless batches of a seed: model inputs and classes.
        held_out: batches for evaluation only.
    """

    steps: int
    start: Callable[[int], nn.Module]
    optimizer: Callable[[Any, Callable[..., Any]], torch.optim.Optimizer]
    rate: Callable[[int], float]
    clip: float | None
    batches: Callable[[int], Iterator[tuple[tuple[Tensor, ...], Tensor]]]
    held_out: list[tuple[tuple[Tensor, ...], Tensor]]


def digits_task(steps: int) -> Task:
    import digits  # each task needs packages of its own

    training, test = digits.load()

    def start(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return digits.Net()

    def batches(seed: int) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield from (((x,), y) for x, y in training.batches(generator))

    return Task(
        steps,
        start,
        lambda model, kind: kind(model.parameters(), lr=digits.RATE, weight_decay=digits.DECAY, min_numel=128),
        lambda step: (1 + torch.cos(torch.tensor(torch.pi * step / steps)).item()) / 2,
        None,
        batches,
        [((test.pixels,), test.digits)],
    )


def minilm_task(steps: int) -> Task:
    import finetune_minilm as finetune

    model, training, held_out = finetune.load()
    model.embed.requires_grad_(True)

    def start(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model.head.reset_parameters()
        return copy.deepcopy(model)

    def batches(seed: int) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
        while True:
            yield from training.batches(finetune.BATCH, seed)
            seed += 1000

    return Task(
        steps,
        start,
        lambda model, kind: finetune.optimizer(model, kind, min_numel=4096),
        functools.partial(finetune.rate, steps=steps),
        finetune.CLIP,
        batches,
        list(held_out.batches(64, 0)),
    )


TASKS: dict[str, Callable[[int], Task]] = {"digits": digits_task, "minilm": minilm_task}
STEPS = {"digits": 420, "minilm": 120}


# ---- training


def train(task: Task, name: str, seed: int) -> dict[str, Any]:
    """Train with the optimizer `name`. Returns the measurements."""
    model = task.start(seed)
    if name == MOVED:
        move(model)
    optimizer = task.optimizer(model, OPTIMIZERS[name])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, task.rate)
    losses: list[float] = []
    begin = time.perf_counter()
    for _, (inputs, classes) in zip(range(task.steps), task.batches(seed), strict=False):
        loss = functional.cross_entropy(model(*inputs), classes)
        optimizer.zero_grad()
        loss.backward()
        if task.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - begin
    held_out, right = evaluate(model, task)
    return {
        "final_loss": statistics.mean(losses[-LAST:]),
        "held_out_loss": held_out,
        "held_out_accuracy": right,
        **sizes(optimizer),
        "seconds": seconds,
        "losses": losses,
    }


def move(model: nn.Module) -> None:
    """Perturb each weight by a relative MOVE, up or down."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + MOVE * torch.randn(p.shape, generator=generator).sign())


def evaluate(model: nn.Module, task: Task) -> tuple[float, float]:
    """The mean loss and the accuracy in percent on held-out data."""
    with torch.no_grad():
        logits = torch.cat([model(*inputs) for inputs, _ in task.held_out])
    classes = torch.cat([y for _, y in task.held_out])
    right = 100 * (logits.argmax(1) == classes).double().mean().item()
    return functional.cross_entropy(logits, classes).item(), right


def sizes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The number of trained parameters, the percentage with quantized states, and the bytes of all states except step
    counts.
    """
    parameters, quantized, size = 0, 0, 0
    for p, state in optimizer.state.items():
        held = [x for key, x in state.items() if key != "step"]
        parameters += p.numel()
        quantized += p.numel() if all(isinstance(x, hop.QuantizedTensor) for x in held) else 0
        for x in held:
            size += sum(t.nbytes for t in (x.buffers().values() if isinstance(x, hop.QuantizedTensor) else [x]))
    return {"parameters": parameters, "quantized": 100 * quantized / parameters, "state_bytes": size}


# ---- the comparison


def compare(task: Task, seeds: int) -> dict[str, list[dict[str, Any]]]:
    """The measurements of all trainings, by optimizer and seed."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in OPTIMIZERS}
    for seed in range(seeds):
        for name, runs in found.items():
            runs.append(train(task, name, seed))
            r = runs[-1]
            print(
                f"seed {seed} {name:16}{r['final_loss']:10.5f}{r['held_out_loss']:10.4f}{r['held_out_accuracy']:8.1f}"
                f"{r['seconds']:8.0f} s",
                flush=True,
            )
    return found


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Means over seeds, differences of the final losses from float32's, and the mean curve."""
    result: dict[str, Any] = {}
    for name, runs in found.items():
        mean = {key: statistics.mean(r[key] for r in runs) for key in runs[0] if key != "losses"}
        pairs = zip(runs, found[FLOAT], strict=True)
        result[name] = {
            **mean,
            "differs": mean["final_loss"] / result.get(FLOAT, mean)["final_loss"] - 1,
            "differs_by_seed": [r["final_loss"] / plain["final_loss"] - 1 for r, plain in pairs],
            "final_losses": [r["final_loss"] for r in runs],
            "losses": [float(f"{statistics.mean(x):.5g}") for x in zip(*(r["losses"] for r in runs), strict=True)],
        }
    return result


HEADER = (
    f"{'':16}{'final loss':>12}{'against float32':>17}{'by seed, %':>24}{'held out':>10}{'% right':>9}"
    f"{'quantized':>11}{'MB of states':>14}"
)


def line(name: str, row: dict[str, Any]) -> str:
    by_seed = " ".join(f"{100 * off:+.2f}" for off in row["differs_by_seed"])
    return (
        f"{name:16}{row['final_loss']:12.5f}{100 * row['differs']:+15.2f} %{by_seed:>24}{row['held_out_loss']:10.4f}"
        f"{row['held_out_accuracy']:9.1f}{row['quantized']:9.1f} %{row['state_bytes'] / 1e6:14.3f}"
    )


def check(task: str, rows: dict[str, Any]) -> None:
    plain = rows[FLOAT]
    for name, allowed in ALLOWED[task].items():
        row = rows[name]
        require(
            abs(row["differs"]) <= allowed,
            f"{task}, {name}: the final loss differs from float32's by {row['differs']:+.2%}, over {allowed:.0%}",
        )
    for name in OPTIMIZERS.keys() - {FLOAT, MOVED}:
        part = rows[name]["state_bytes"] / plain["state_bytes"]
        require(part < 0.3, f"{task}, {name}: the states take {part:.2f} of the bytes of float32's")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=(*TASKS, "all"), default="all")
    parser.add_argument("--steps", type=int, help="of each training (digits: 420, minilm: 120)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (3)")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    args = parser.parse_args()
    # With several threads, other load on one core would delay every small operator by milliseconds.
    torch.set_num_threads(1)

    start = time.perf_counter()
    tasks: dict[str, Any] = {}
    for name in TASKS if args.task == "all" else [args.task]:
        steps = args.steps or STEPS[name]
        print(f"{name}: {steps} steps; final loss, held-out loss, percent right:", flush=True)
        tasks[name] = summary(compare(TASKS[name](steps), args.seeds))
        print(HEADER, *(line(optimizer, row) for optimizer, row in tasks[name].items()), sep="\n", flush=True)
    seconds = time.perf_counter() - start
    print(f"done in {seconds:.0f} s")
    if args.output is not None:
        write(args.output, tasks, args.seeds, seconds)
    for name, rows in tasks.items():
        check(name, rows)


def write(path: Path, tasks: dict[str, Any], seeds: int, seconds: float) -> None:
    content = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "seeds": seeds,
        "last": LAST,
        "tasks": tasks,
    }
    path.write_text(json_rows(content) + "\n")


if __name__ == "__main__":
    main()
