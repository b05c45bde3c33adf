"""Compare gradient estimators on handwritten digits: the error of a network with 2-bit weights, over seeds.

    python -m benchmarks.estimators [--seeds 20] [--epochs 20]     prints, and writes benchmarks/results/estimators.json

Each network is trained in floats, then as long again with 2-bit weights and float activations, from the same weights
and over the same batches. The runs differ in the surrogate gradient of rounding, and in whether scales are learned.
Scales are per row, and start with the least squared error of the float weights. Errors are on 500 held-out images.
Intervals are those of the ratio to the first row's mean error, from 10,000 bootstrap samples of seeds, common to both
means.
"""

import argparse
import copy
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hop
from examples.common import json_rows
from hop import Quantizer, Scheme, estimators, formats, scale_rules

RESULTS = Path(__file__).parent / "results" / "estimators.json"
INT2 = formats.Integer("int2", 2, torch.int8, -2, 1)
FOUND = Scheme(None, Quantizer(INT2, (1, -1), scale_rules.AbsMean()))
GIVEN = Scheme(None, Quantizer(INT2, (1, -1), scale_rules.Static()))


def by(gradient: Any) -> Scheme:
    assert GIVEN.rhs is not None
    return replace(GIVEN, rhs=replace(GIVEN.rhs, gradient=gradient))


# The scheme, and whether its scales are learned.
WAYS: dict[str, tuple[Scheme, bool]] = {
    "STE": (GIVEN, False),
    "STE, scales of mean magnitudes, in each step": (FOUND, False),
    "LSQ": (by(estimators.LSQ()), True),
    "PACT": (by(estimators.PACT()), True),
    "EWGS, scales learned": (by(estimators.EWGS(0.2)), True),
    "SoftRounding(2), scales learned": (by(estimators.SoftRounding(2.0)), True),
}


def errors(seed: int, epochs: int, training: Any, test: Any) -> dict[str, float]:
    """The test error of each estimator in percent."""
    from examples.digits import Net, accuracy, train

    torch.manual_seed(seed)
    floats = Net()
    train(floats, training, epochs, seed)
    found: dict[str, float] = {}
    for name, (scheme, learns) in WAYS.items():
        model = hop.nn.convert(copy.deepcopy(floats), scheme, learn_scales=learns)
        for layer in model.modules():
            if isinstance(layer, hop.nn.Layer) and scheme is not FOUND:
                scales: Any = layer.scales
                q = layer.weight_quantizer(scheme.rhs)  # type: ignore[arg-type]
                scales["weight"].set(**hop.calibration.mse(q, layer.weight.detach()))
        train(model, training, epochs, seed + 1000)
        with torch.no_grad():
            found[name] = 100 - accuracy(model(test.pixels), test.digits)
    return found


def interval(own: list[float], first: list[float]) -> tuple[float, float]:
    """The 95 % interval of the ratio of means over bootstrap samples of seeds."""
    chosen = np.random.default_rng(0).integers(len(own), size=(10_000, len(own)))
    ratios = np.asarray(own)[chosen].mean(1) / np.maximum(np.asarray(first)[chosen].mean(1), 1e-9)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=20)
    given = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[1] / "examples"))  # examples import each other
    from examples.digits import load

    torch.set_num_threads(1)
    training, test = load()
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for seed in range(given.seeds):
        for name, error in errors(seed, given.epochs, training, test).items():
            found[name].append(error)
        print(seed, *(f"{name} {own[-1]:.1f}" for name, own in found.items()), sep="  ", flush=True)
    first = next(iter(found.values()))
    rows: dict[str, Any] = {}
    for name, own in found.items():
        low, high = interval(own, first)
        rows[name] = {"errors": own, "ratio": statistics.mean(own) / statistics.mean(first), "low": low, "high": high}
        print(f"{name:34} {statistics.mean(own):.2f} %, {rows[name]['ratio']:.2f} ({low:.2f} to {high:.2f})")
    RESULTS.write_text(json_rows({"seeds": given.seeds, "epochs": given.epochs, "ways": rows}) + "\n")


if __name__ == "__main__":
    main()
