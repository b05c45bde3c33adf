"""What the algorithms of hop.algorithms do to all-MiniLM-L6-v2, on sentences held out.

    python -m benchmarks.algorithms [chosen gptq ...] [--draws 5]

The loss is 1 - the mean cosine to the float32 embeddings. A draw is a random choice of 64 sentences to look at, by its
number as the seed; all the others are held out. Only the layers of the encoder are quantized.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import hop
from hop import algorithms, formats
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme

LOOKED_AT, BATCH = 64, 16
ENCODER = "*.encoder.*"
Batch = tuple[Tensor, Tensor]


class Data:
    """The model, and the sentences of one draw."""

    def __init__(self, seed: int) -> None:
        from examples.quantized_bert import SENTENCES, Embedder, load_encoder

        bert, self._tokenizer = load_encoder()
        self.model = Embedder(bert).eval()
        lines = [s for s in SENTENCES.read_text(encoding="utf-8").splitlines() if s and not s.startswith("#")]
        order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(seed)).tolist()
        drawn = [lines[i] for i in order]
        self.looked_at, self.held_out = self._batches(drawn[:LOOKED_AT]), self._batches(drawn[LOOKED_AT:])
        self.wanted = self._embed(self.model)

    def fresh(self) -> Any:
        """A copy of the float model."""
        return copy.deepcopy(self.model)

    def loss(self, model: Any) -> float:
        return 1 - float((self._embed(model) * self.wanted).sum(1).mean())

    def _embed(self, model: Any) -> Tensor:
        with torch.no_grad():
            return torch.cat([model(*batch) for batch in self.held_out])

    def _batches(self, sentences: Sequence[str]) -> list[Batch]:
        ordered = sorted(sentences, key=len)
        found = (
            self._tokenizer(ordered[i : i + BATCH], padding=True, return_tensors="pt")
            for i in range(0, len(ordered), BATCH)
        )
        return [(t["input_ids"], t["attention_mask"]) for t in found]


def plainly(data: Data, scheme: Any) -> Any:
    """Rounded to the nearest."""
    return hop.quantize_(data.fresh(), scheme, filter=ENCODER, calibrate=data.looked_at)


# ---- what is compared: from a draw to the losses before and after


def gptq(scheme: Any) -> Callable[[Data], tuple[float, float]]:
    def run(data: Data) -> tuple[float, float]:
        done = algorithms.gptq(data.fresh(), scheme, data.looked_at, filter=ENCODER)
        return data.loss(plainly(data, scheme)), data.loss(done)

    return run


def chosen(group: int, measure: Any) -> Callable[[Data], tuple[float, float]]:
    """Bits of 3, 4, 5, 6, 8 in the bytes of 5 for all."""
    uniform, *_ = several = [Quantizer(getattr(formats, f"INT{bits}"), (1, group)) for bits in (5, 3, 4, 6, 8)]

    def run(data: Data) -> tuple[float, float]:
        plain = plainly(data, uniform)
        size = sum(
            algorithms.dense_bytes(m.weight.quantizer, m.weight.shape)
            for m in plain.modules()
            if isinstance(m, hop.nn.Linear)
        )
        found = algorithms.choose_bits(data.model, several, data.looked_at, size=size, measure=measure, filter=ENCODER)
        assert found.size <= size
        return data.loss(plain), data.loss(hop.quantize_(data.fresh(), found.rules))

    return run


def smooth(algorithm: Any, scheme: Any, **settings: Any) -> Callable[[Data], tuple[float, float]]:
    def run(data: Data) -> tuple[float, float]:
        model = algorithm(data.fresh(), scheme, data.looked_at, filter=ENCODER, **settings)
        done = hop.quantize_(model, scheme, filter=ENCODER, calibrate=data.looked_at)
        return data.loss(plainly(data, scheme)), data.loss(done)

    return run


def rotated(scheme: Any, then_gptq: bool, **settings: Any) -> Callable[[Data], tuple[float, float]]:
    def run(data: Data) -> tuple[float, float]:
        rotation = algorithms.Rotation(**settings)
        model = algorithms.rotate(data.fresh(), scheme, data.looked_at, filter=ENCODER, settings=rotation)
        if then_gptq:
            done = algorithms.gptq(model, scheme, data.looked_at, filter=ENCODER)
        else:
            done = hop.quantize_(model, scheme, filter=ENCODER)
        return data.loss(plainly(data, scheme)), data.loss(done)

    return run


CASES: dict[str, Callable[[Data], tuple[float, float]]] = {
    "gptq-int4": gptq(Scheme(None, hop.presets.INT4_128)),
    "gptq-nvfp4": gptq("nvfp4"),
    "gptq-mxfp4": gptq("mxfp4"),
    "chosen-fisher": chosen(128, algorithms.Fisher()),
    "smooth-int8": smooth(algorithms.smoothquant, "int8_static"),
    "smooth-folded": smooth(algorithms.smoothquant, "int8_static", explicit=False),
    "awq-int4": smooth(algorithms.awq, Scheme(None, hop.presets.INT4_128)),
    "rotate-mxfp4": rotated("mxfp4", False),
    "rotate-mxfp4-gptq": rotated("mxfp4", True),
    "rotate-mxfp4-always-gptq": rotated("mxfp4", True, always=True),
    "rotate-nvfp4": rotated("nvfp4", False, always=True),
    "rotate-nvfp4-gptq": rotated("nvfp4", True, always=True),
    "chosen-sqnr": chosen(128, algorithms.SQNR()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}, or their beginnings; all where none is given")
    parser.add_argument("--draws", type=int, default=5)
    given = parser.parse_args()
    names = [n for n in CASES if not given.names or any(n.startswith(name) for name in given.names)]
    torch.set_num_threads(1)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for seed in range(given.draws):
        data = Data(seed)
        for name in names:
            start = time.perf_counter()
            before, after = CASES[name](data)
            found[name].append((before, after))
            cut = 1 - after / before
            print(
                f"draw {seed}  {name:16} {before:.5f} -> {after:.5f}  cut {cut:6.1%}  "
                f"{time.perf_counter() - start:.0f} s",
                flush=True,
            )
    for name, pairs in found.items():
        before, after = (statistics.mean(x) for x in zip(*pairs, strict=True))
        cuts = sorted(1 - b / a for a, b in pairs)
        print(
            f"{name:16} {before:.5f} -> {after:.5f}  cut {statistics.mean(cuts):.1%}  from {cuts[0]:.1%} to "
            f"{cuts[-1]:.1%}, {len(pairs)} draws"
        )


if __name__ == "__main__":
    main()
