"""Fine-tune all-MiniLM-L6-v2 in float32, in int8 and in 8-bit floats, over the same batches, and compare.

python examples/finetune_minilm.py [--steps N] [--threads N] [--eager] [--output FILE.json]

The task is to predict the standard library module that a docstring sentence comes from. All three runs start from the
same weights; in two of them, linear layers compute forward and backward products on codes. No network access is needed.
Without a C++ compiler, the times of compiled steps are skipped with a message.

Ends with exit code 1 if a claim of docs/training.md does not hold.
"""

import argparse
import copy
import functools
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import docstrings
import torch
from common import find_compiler, json_rows, require
from quantized_bert import Batch, Embedder, load_encoder
from torch import Tensor, nn
from torch.nn import functional

import hop
from hop.kernels.cpu import native
from hop.numerics.recipes import FP8_HYBRID, INT8_TRAINING

SCHEMES = {"float32": None, "INT8_TRAINING": INT8_TRAINING, "FP8_HYBRID": FP8_HYBRID}
BATCH, TOKENS = 16, 24  # per step; all sentences are padded or cut to this many tokens
RATE, HEAD_RATE, DECAY, CLIP = 1e-4, 1e-3, 0.01, 1.0
WARMUP = 0.1  # fraction of the steps; afterwards the rate decreases linearly to 0
HELD_OUT = 512  # sentences
LAST = 50  # the final loss is the mean over this many last steps
ALLOWED = 0.05  # most difference of the final loss from float32's
ROUNDS = 15  # timed steps, but no more than training steps


class Classifier(nn.Module):
    """Token ids and mask, (sentences, tokens) each, to logits, (sentences, modules)."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.embed = Embedder(bert)
        self.head = nn.Linear(384, len(docstrings.MODULES))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.embed(input_ids, attention_mask) * 384**0.5)  # embeddings have length 1


class Sentences:
    """Tokens of sentences, and the modules that they come from."""

    def __init__(self, tokenizer: Any, found: Sequence[tuple[str, int]]) -> None:
        texts, labels = zip(*found, strict=True)
        tokens = tokenizer(list(texts), padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
        self.ids, self.mask, self.labels = tokens["input_ids"], tokens["attention_mask"], torch.tensor(labels)

    def batches(self, size: int, seed: int) -> Iterator[tuple[Batch, Tensor]]:
        """All sentences in random order; an incomplete last batch is dropped."""
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(seed))
        for chosen in order[: len(order) // size * size].split(size):
            yield (self.ids[chosen], self.mask[chosen]), self.labels[chosen]

    def endless(self, size: int) -> Iterator[tuple[Batch, Tensor]]:
        seed = 0
        while True:
            yield from self.batches(size, seed)
            seed += 1


def load() -> tuple[Classifier, Sentences, Sentences]:
    """The initial model, whose embeddings are frozen, the training sentences and the held-out ones."""
    bert, tokenizer = load_encoder()
    for module in bert.modules():  # dropout would draw different random numbers in each scheme
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    bert.get_submodule("embeddings").requires_grad_(False)
    train_texts, held_out_texts = docstrings.load()
    chosen = torch.randperm(len(held_out_texts), generator=torch.Generator().manual_seed(0))[:HELD_OUT]
    training = Sentences(tokenizer, train_texts)
    held_out = Sentences(tokenizer, [held_out_texts[i] for i in chosen])
    torch.manual_seed(0)
    return Classifier(bert).train(), training, held_out


def optimizer(model: Any, kind: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> Any:
    """An optimizer of the kind for a Classifier, quantized or not."""
    groups = [
        {"params": [p for p in model.embed.parameters() if p.requires_grad], "lr": RATE},
        {"params": list(model.head.parameters()), "lr": HEAD_RATE},
    ]
    return kind(groups, weight_decay=DECAY, **options)


def rate(step: int, steps: int) -> float:
    """The fraction of the full learning rate in a step: a warmup, then a linear decrease to 0."""
    warmup = max(1, round(WARMUP * steps))
    return min((step + 1) / warmup, max(0.0, (steps - step) / (steps - warmup + 1)))


class Run:
    """A training of a copy of `model` in a scheme."""

    def __init__(self, model: Classifier, scheme: hop.Scheme | None, steps: int) -> None:
        self.model = copy.deepcopy(model)
        if scheme is not None:
            embed = hop.nn.convert(self.model.embed, [(nn.Linear, scheme)])
            left = [row.name for row in embed.hop_report.rows if row.type == "Linear" and row.scheme is None]
            require(not left, f"linear layers that were not converted: {left}")
        self.optimizer = optimizer(self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, functools.partial(rate, steps=steps))
        self.losses: list[float] = []

    def step(self, number: int, batch: Batch, labels: Tensor) -> float:
        """Run one training step; returns its loss."""
        torch.manual_seed(number)  # for stochastic rounding
        loss = functional.cross_entropy(self.model(*batch), labels)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return loss.item()

    def evaluate(self, held_out: Sentences) -> tuple[float, float]:
        """The mean loss and the accuracy in percent."""
        with torch.no_grad():
            found = [(self.model(*batch), labels) for batch, labels in held_out.batches(64, 0)]
        logits, labels = torch.cat([y for y, _ in found]), torch.cat([labels for _, labels in found])
        right = 100 * (logits.argmax(1) == labels).double().mean().item()
        return functional.cross_entropy(logits, labels).item(), right

    def saved(self, batch: Batch, labels: Tensor) -> int:
        """Bytes of the tensors that a forward saves for its backward, without parameters; each storage counts once."""
        own = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        kept: dict[int, int] = {}

        def see(t: Tensor) -> Tensor:
            for part in t.buffers().values() if isinstance(t, hop.QuantizedTensor) else [t]:
                storage = part.untyped_storage()
                if storage.data_ptr() not in own:
                    kept[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(see, lambda t: t):
            loss = functional.cross_entropy(self.model(*batch), labels)
        total = sum(kept.values())  # the graph of `loss` keeps them alive, so that addresses are unique
        del loss
        return total


def train(runs: dict[str, Run], steps: int, training: Sentences) -> None:
    batches = training.endless(BATCH)
    for number in range(steps):
        batch, labels = next(batches)
        for run in runs.values():
            run.losses.append(run.step(number, batch, labels))
            run.schedule.step()
        if number % 20 == 0 or number == steps - 1:
            recent = {name: statistics.mean(run.losses[-20:]) for name, run in runs.items()}
            print(f"{number + 1:5} " + "  ".join(f"{name} {loss:.4f}" for name, loss in recent.items()), flush=True)


def compiled(model: Classifier, scheme: hop.Scheme | None, steps: int) -> Run:
    """A training whose encoder layers are compiled one by one, so that they share a program."""
    run = Run(model, scheme, steps)
    for layer in run.model.embed.bert.encoder.layer:  # type: ignore[union-attr]
        layer.compile()
    return run


def step_times(runs: dict[str, Run], training: Sentences, rounds: int) -> dict[str, float]:
    """Median seconds per step of each run, in rounds with a rotating order, after two warm-up rounds."""
    names, batches = list(runs), training.endless(BATCH)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(2 + rounds):
        batch, labels = next(batches)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            runs[name].step(number, batch, labels)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken[2:]) for name, taken in seconds.items()}


def final(losses: Sequence[float]) -> float:
    return statistics.mean(losses[-LAST:])


def report(runs: dict[str, Run], training: Sentences, held_out: Sentences) -> dict[str, Any]:
    """The measurements of each run, by name."""
    batch, labels = next(training.batches(BATCH, 0))
    found: dict[str, Any] = {}
    for name, run in runs.items():
        loss, right = run.evaluate(held_out)
        found[name] = {
            "final_loss": final(run.losses),
            "held_out_loss": loss,
            "held_out_accuracy": right,
            "saved_bytes": run.saved(batch, labels),
            "losses": [round(x, 4) for x in run.losses],
        }
    return found


def check(found: dict[str, Any], begin: float) -> None:
    for name, row in found.items():
        loss, off = row["held_out_loss"], row["final_loss"] / found["float32"]["final_loss"] - 1
        require(loss < begin, f"{name}: the loss on held-out sentences was {begin:.4f}, and {loss:.4f} after training")
        require(abs(off) <= ALLOWED, f"{name}: the final loss differs from float32's by {off:+.1%}, over {ALLOWED:.0%}")


def line(name: str, row: dict[str, Any]) -> str:
    compiled = f"{row['compiled_seconds'] * 1e3:10.0f}" if "compiled_seconds" in row else f"{'':10}"
    return (
        f"{name:14}{row['final_loss']:12.4f}{row['held_out_loss']:10.4f}{row['held_out_accuracy']:10.1f}"
        f"{row['eager_seconds'] * 1e3:10.0f}{compiled}{row['saved_bytes'] / 1e6:10.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of training in each scheme (300)")
    # With several threads, other load on one core would delay every small operator by milliseconds.
    parser.add_argument("--threads", type=int, default=1, help="that PyTorch computes with (1)")
    parser.add_argument("--eager", action="store_true", help="leave out the times of compiled steps")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    start = time.perf_counter()
    model, training, held_out = load()
    print(
        f"{len(training.labels)} sentences to train with, {HELD_OUT} held out, of {len(docstrings.MODULES)} modules of "
        f"Python {platform.python_version()}; batches of {BATCH}x{TOKENS} tokens, {torch.get_num_threads()} threads"
    )

    runs = {name: Run(model, scheme, args.steps) for name, scheme in SCHEMES.items()}
    begin, right = runs["float32"].evaluate(held_out)
    print(f"before training: loss {begin:.4f}, {right:.1f} % right; mean losses of the last 20 steps:")
    train(runs, args.steps, training)
    found = report(runs, training, held_out)
    timed = {f"{name}/eager_seconds": run for name, run in runs.items()}
    if not args.eager and find_compiler() is None:
        print("SKIPPED compiled steps: they need a C++ compiler, and there is no $CXX, c++, g++ or clang++")
    elif not args.eager:
        timed |= {f"{name}/compiled_seconds": compiled(model, scheme, args.steps) for name, scheme in SCHEMES.items()}
    rounds = min(ROUNDS, args.steps)
    print(f"timing {rounds} rounds of steps")
    for name, taken in step_times(timed, training, rounds).items():
        run, _, field = name.partition("/")
        found[run][field] = taken
    seconds = time.perf_counter() - start
    print(f"\n{'':14}{'final loss':>12}{'held out':>20}{'ms per step':>20}{'MB saved':>10}")
    print(f"{'':24}{'loss':>12}{'% right':>10}{'eager':>10}{'compiled':>10}")
    for name, row in found.items():
        print(line(name, row))
    print(f"done in {seconds:.0f} s")
    if args.output is not None:
        content = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "level": native.library().path,
            "seconds": seconds,
            "train": len(training.labels),
            "held_out": HELD_OUT,
            "before": {"held_out_loss": begin, "held_out_accuracy": right},
            "runs": found,
        }
        args.output.write_text(json_rows(content) + "\n")
    check(found, begin)


if __name__ == "__main__":
    main()
