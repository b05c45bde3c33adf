"""Train a small network on handwritten digits in floats, fake-quantized, and in int8; deploy it as integers; compare.

python examples/digits.py [--seeds N] [--epochs N] [--output FILE.json]

For each seed, a network is trained in floats and its scales are calibrated. Three copies then continue training over
the same batches: in floats; with fake-quantized inputs and weights, whose products are float products; and with hop.nn,
whose products are integer products. The last two are deployed: weights become codes, and torch.export and
hop.decompositions() produce a core ATen program with integer products.

Ends with exit code 1 if a claim of docs/training.md does not hold.
"""

import argparse
import copy
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from common import ignore_warnings_of_export, json_rows, require
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import hop

aten = torch.ops.aten
SCHEME = hop.schemes.INT8_STATIC
TEST = 500  # of the 1797 images
BATCH, RATE, DECAY = 64, 2e-3, 1e-3
ALLOWED = 0.5  # most percentage points by which the mean integer accuracy may be below the float one
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default)


class Net(nn.Module):
    """(images, 1, 8, 8) -> (images, 10): two convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.last = nn.Linear(32 * 2 * 2, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.first(x)), 2)
        x = functional.max_pool2d(functional.relu(self.second(x)), 2)
        return self.last(x.flatten(1))


class FakeQuantized(nn.Module):
    """A float layer with fake-quantized inputs and weights, using the quantizers and scales of a hop.nn layer.

    Its product is a float product, and gradients pass straight through the rounding.
    """

    static: hop.nn.StaticScale

    def __init__(self, layer: nn.Module, like: hop.nn.Layer) -> None:
        super().__init__()
        assert like.scheme.lhs is not None and like.scheme.rhs is not None
        self.inputs, self.weights = like.scheme.lhs, like.weight_quantizer(like.scheme.rhs)
        self.layer, self.static = layer, cast(hop.nn.StaticScale, like.scales["input"])

    def forward(self, x: Tensor) -> Tensor:
        x = hop.fake_quantize(self.inputs, x, scale=self.static.scale, zero_point=self.static.zero_point)
        weight: Any = self.layer.weight
        return torch.func.functional_call(self.layer, {"weight": hop.fake_quantize(self.weights, weight)}, (x,))


# ---- data and training


@dataclass(frozen=True)
class Images:
    """8×8 images with pixels in [0, 1], (images, 1, 8, 8), and the digits that they show."""

    pixels: Tensor
    digits: Tensor

    def batches(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(len(self.digits), generator=generator).split(BATCH):
            yield self.pixels[chosen], self.digits[chosen]


def load() -> tuple[Images, Images]:
    """The training and test images, with the same split for all seeds."""
    found: Any = load_digits()
    pixels = torch.from_numpy(found.images).to(torch.float32).unsqueeze(1) / 16
    digits = torch.from_numpy(found.target).to(torch.int64)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST], order[TEST:]
    return Images(pixels[train], digits[train]), Images(pixels[test], digits[test])


def train(model: nn.Module, images: Images, epochs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    steps = epochs * -(-len(images.digits) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(epochs):
        for pixels, digits in images.batches(generator):
            loss = functional.cross_entropy(model(pixels), digits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()


# ---- deployment


def deployed(model: nn.Module, example: Tensor) -> Any:
    """The integer program of a hop.nn model: core ATen, for any number of images."""
    model = copy.deepcopy(model)
    hop.nn.freeze(model)
    count = torch.export.Dim("images", min=2)
    program = torch.export.export(model, (example,), dynamic_shapes=({0: count},))
    program = program.run_decompositions(hop.decompositions())
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    foreign = {str(node.target) for node in nodes if getattr(node.target, "namespace", "aten") != "aten"}
    require(not foreign, f"the deployed program has operators that are not ATen's: {sorted(foreign)}")
    products = [node for node in nodes if node.target in PRODUCTS]
    layers = sum(isinstance(module, hop.nn.Layer) for module in model.modules())
    floats = [node for node in products if any(n.meta["val"].is_floating_point() for n in node.all_input_nodes)]
    require(len(products) == layers, f"the deployed program has {len(products)} products for {layers} layers")
    require(not floats, f"the deployed program multiplies floats: {floats}")
    return program.module()


# ---- the comparison


@dataclass(frozen=True)
class Result:
    """The outcome of one seed: test accuracy of each model in percent, and how many logits and predictions change when
    it is deployed.
    """

    seed: int
    float_accuracy: float
    fake_accuracy: float
    fake_deployed_accuracy: float
    fake_logits_changed: int
    fake_predictions_changed: int
    fake_largest_change: float  # of a logit
    int8_accuracy: float
    int8_deployed_accuracy: float
    int8_logits_changed: int
    int8_predictions_changed: int


def run(seed: int, epochs: int, training: Images, test: Images) -> Result:
    torch.manual_seed(seed)
    floats = Net()
    train(floats, training, epochs, seed)

    int8 = hop.nn.convert(copy.deepcopy(floats), SCHEME)
    hop.nn.calibrate(int8, training.pixels.split(BATCH), progress=False)
    calibrated = copy.deepcopy(int8)
    fake = copy.deepcopy(floats)
    for name, layer in list(fake.named_children()):
        setattr(fake, name, FakeQuantized(layer, calibrated.get_submodule(name)))  # type: ignore[arg-type]

    for model in (floats, fake, int8):
        train(model, training, epochs, seed + 1000)

    # The fake-quantized model was trained with the scales of `calibrated`; combine them with its weights.
    of_fake = copy.deepcopy(calibrated).eval()
    of_fake.load_state_dict(
        {key.replace(".layer.", "."): t for key, t in fake.state_dict().items() if ".layer." in key}
    )
    with torch.no_grad():
        logits = {"float": floats(test.pixels), "fake": fake(test.pixels), "int8": int8(test.pixels)}
        logits["fake_deployed"] = deployed(of_fake, test.pixels)(test.pixels)
        logits["int8_deployed"] = deployed(int8, test.pixels)(test.pixels)
    found: dict[str, Any] = {f"{name}_accuracy": accuracy(y, test.digits) for name, y in logits.items()}
    for name in ("fake", "int8"):
        before, after = logits[name], logits[f"{name}_deployed"]
        found[f"{name}_logits_changed"] = int((before.view(torch.int32) != after.view(torch.int32)).sum())
        found[f"{name}_predictions_changed"] = int((before.argmax(1) != after.argmax(1)).sum())
    largest = (logits["fake"] - logits["fake_deployed"]).abs().max().item()
    return Result(seed=seed, fake_largest_change=largest, **found)


def accuracy(logits: Tensor, digits: Tensor) -> float:
    """The accuracy in percent."""
    return 100 * (logits.argmax(1) == digits).double().mean().item()


HEADER = (
    f"{'':6}{'float':>8}{'fake-quantized':>18}{'':30}{'int8':>10}\n"
    f"{'seed':6}{'':8}{'trained':>10}{'deployed':>10}{'logits, predictions changed':>30}"
    f"{'trained':>10}{'deployed':>10}{'changed':>10}"
)


def line(r: Result) -> str:
    changed = f"{r.fake_logits_changed}, {r.fake_predictions_changed}"
    return (
        f"{r.seed:<6}{r.float_accuracy:8.1f}{r.fake_accuracy:10.1f}{r.fake_deployed_accuracy:10.1f}{changed:>30}"
        f"{r.int8_accuracy:10.1f}{r.int8_deployed_accuracy:10.1f}"
        f"{f'{r.int8_logits_changed}, {r.int8_predictions_changed}':>10}"
    )


def summary(results: Sequence[Result], images: int) -> str:
    floats, int8 = means(results)
    after_int8, after_fake = (sum(getattr(r, f"{name}_logits_changed") for r in results) for name in ("int8", "fake"))
    return (
        f"mean: {floats:.2f} in floats, {int8:.2f} of the deployed integers\n"
        f"deployment changes {after_int8} of {10 * images * len(results)} logits after int8 training, "
        f"{after_fake} after fake quantization"
    )


def means(results: Sequence[Result]) -> tuple[float, float]:
    """The mean accuracy over seeds, in floats and of the deployed int8 model."""
    return statistics.mean(r.float_accuracy for r in results), statistics.mean(
        r.int8_deployed_accuracy for r in results
    )


def check(results: Sequence[Result]) -> None:
    for r in results:
        require(r.int8_logits_changed == 0, f"seed {r.seed}: deployment changed {r.int8_logits_changed} logits of int8")
    floats, int8 = means(results)
    require(
        int8 >= floats - ALLOWED,
        f"the deployed integers get {int8:.2f} % right, more than {ALLOWED} points below the {floats:.2f} % of floats",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="how many (5)")
    parser.add_argument("--epochs", type=int, default=20, help="in floats, and as many again in each arithmetic (20)")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    args = parser.parse_args()
    ignore_warnings_of_export()
    # With several threads, other load on one core would delay every small operator by milliseconds.
    torch.set_num_threads(1)

    start = time.perf_counter()
    training, test = load()
    count = {"train": len(training.digits), "test": len(test.digits)}
    print(f"{count['train']} images to train with, {count['test']} to test with; percent of those right:\n{HEADER}")
    results = []
    for seed in range(args.seeds):
        results.append(run(seed, args.epochs, training, test))
        print(line(results[-1]), flush=True)
    seconds = time.perf_counter() - start
    print(f"{summary(results, count['test'])}\ndone in {seconds:.0f} s")
    if args.output is not None:
        content = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "seconds": seconds,
            "epochs": args.epochs,
            **count,
            "results": [asdict(r) for r in results],
        }
        args.output.write_text(json_rows(content) + "\n")
    check(results)


if __name__ == "__main__":
    main()
