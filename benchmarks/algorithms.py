"""The effect of hop.algorithms on all-MiniLM-L6-v2, on held-out sentences: format × algorithm × draw.

    python -m benchmarks.algorithms [int4 nvfp4/GPTQ ...] [--draws 5]     prints, and writes results/algorithms.json
    python -m benchmarks.algorithms --cost                                time and memory of GPTQ, in new processes

The loss is 1 - the mean cosine similarity with the float32 embeddings. A draw is a random choice of 64 sentences for
calibration, with its number as the seed; all other sentences are held out. Only the layers of the encoder are
quantized. Each result is saved immediately and not measured again, so that an interrupted run resumes. To measure rows
again, remove them from the file.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hop
from examples.common import json_rows
from hop import Quantizer, Scheme, algorithms, formats, presets, schemes
from hop.algorithms.candidates import dense_bytes

RESULTS = Path(__file__).parent / "results" / "algorithms.json"
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


# ---- formats, and the algorithms for each: functions from a draw and a scheme to a quantized model


def in_groups(format: Any) -> Scheme:
    return Scheme(None, Quantizer(format, (1, 128)))


SCHEMES: dict[str, Scheme] = {
    "int8 static": schemes.named("int8_static"),
    "int4 in 128": Scheme(None, presets.INT4_128),
    "ternary": Scheme(None, presets.TERNARY_ROW),
    "MXFP8": schemes.named("mxfp8"),
    "MXFP4": schemes.named("mxfp4"),
    "NVFP4": schemes.named("nvfp4"),
    "fp8": schemes.named("fp8"),
    "int5 in 128": in_groups(formats.INT5),
}
BITS = (formats.INT5, formats.INT3, formats.INT4, formats.INT6, formats.INT8)
Algorithm = Callable[[Data, Scheme], Any]


def nearest(data: Data, scheme: Scheme, model: Any = None) -> Any:
    """Round to nearest."""
    model = data.fresh() if model is None else model
    return hop.quantize_(model, scheme, filter=ENCODER, calibrate=data.looked_at)


def gptq(data: Data, scheme: Scheme, model: Any = None) -> Any:
    model = data.fresh() if model is None else model
    return algorithms.gptq(model, scheme, data.looked_at, filter=ENCODER)


def adaround(data: Data, scheme: Scheme) -> Any:
    return algorithms.adaround(data.fresh(), scheme, data.looked_at, filter=ENCODER)


def factors(explicit: bool) -> Algorithm:
    """SmoothQuant for schemes with quantized activations, AWQ for weight-only ones."""

    def run(data: Data, scheme: Scheme) -> Any:
        algorithm: Any = algorithms.awq if scheme.lhs is None else algorithms.smoothquant
        model = algorithm(data.fresh(), scheme, data.looked_at, filter=ENCODER, explicit=explicit)
        return nearest(data, scheme, model)

    return run


def rotated(then: Any, always: bool) -> Algorithm:
    def run(data: Data, scheme: Scheme) -> Any:
        settings = algorithms.Rotation(always=always)
        model = algorithms.rotate(data.fresh(), scheme, data.looked_at, filter=ENCODER, settings=settings)
        return then(data, scheme, model)

    return run


def bias(data: Data, scheme: Scheme) -> Any:
    return algorithms.correct_bias(nearest(data, scheme), data.model, data.looked_at)


def chosen(measure: Any) -> Algorithm:
    """A choice of 3, 4, 5, 6 or 8 bits per layer, within the size of the uniform scheme."""

    def run(data: Data, scheme: Scheme) -> Any:
        several = [in_groups(f) for f in BITS]
        limit = size(nearest(data, scheme))
        found = algorithms.choose_bits(data.model, several, data.looked_at, size=limit, measure=measure, filter=ENCODER)
        assert found.size <= limit
        return hop.quantize_(data.fresh(), found.rules)

    return run


NEAREST, GPTQ, FACTORS, ADAROUND = "nearest", "GPTQ", "factors", "AdaRound"
ROTATION, ROTATION_GPTQ, BIAS = "rotation", "rotation, GPTQ", "bias correction"
FOLDED, ALWAYS, ALWAYS_GPTQ = "factors, folded alone", "rotation everywhere", "rotation everywhere, GPTQ"
FISHER, SQNR = "bits chosen, Fisher", "bits chosen, SQNR"
TABLE: dict[str, Algorithm] = {
    NEAREST: nearest,
    GPTQ: gptq,
    FACTORS: factors(explicit=True),
    ROTATION: rotated(nearest, always=False),
    ROTATION_GPTQ: rotated(gptq, always=False),
    BIAS: bias,
    ADAROUND: adaround,
}
FIRST = [name for name in SCHEMES if name != "int5 in 128"]  # the formats of the table
CELLS: dict[tuple[str, str], Algorithm] = {
    **{(scheme, NEAREST): nearest for scheme in SCHEMES},
    **{(scheme, name): run for name, run in TABLE.items() for scheme in FIRST},
    ("NVFP4", ALWAYS): rotated(nearest, always=True),
    ("NVFP4", ALWAYS_GPTQ): rotated(gptq, always=True),
    ("int8 static", FOLDED): factors(explicit=False),
    ("int5 in 128", FISHER): chosen(algorithms.Fisher()),
    ("int5 in 128", SQNR): chosen(algorithms.SQNR()),
}


def size(model: Any) -> int:
    """The bytes of the quantized layers without padding bits, biases excluded."""
    total = 0
    for layer in model.modules():
        if isinstance(layer, hop.nn.Linear):
            own = [*layer.named_parameters(), *layer.named_buffers()]
            weight = layer.weight
            assert isinstance(weight, hop.QuantizedTensor)
            total += dense_bytes(weight.quantizer, weight.shape)
            total += sum(t.nbytes for name, t in own if name not in ("weight", "bias"))
    return total


# ---- measuring


class Journal:
    """The results on disk: for each format and algorithm, those of draws 0, 1, ..."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.cells: dict[str, Any] = self.held.setdefault("cells", {})

    def row(self, scheme: str, name: str) -> dict[str, Any]:
        return self.cells.setdefault(scheme, {}).setdefault(name, {"losses": [], "seconds": [], "bytes": 0})

    def write(self, **facts: Any) -> None:
        self.held.update(facts)
        new = self.path.with_suffix(".new")
        new.write_text(json_rows(self.held) + "\n")
        new.replace(self.path)


def measure(journal: Journal, which: Sequence[tuple[str, str]], draws: int) -> None:
    torch.set_num_threads(1)
    for seed in range(draws):
        left = [(s, n) for s, n in which if len(journal.row(s, n)["losses"]) == seed]
        if not left:
            continue
        data = Data(seed)
        count = sum(len(ids) for ids, _ in data.held_out)
        for scheme, name in left:
            start = time.perf_counter()
            model = CELLS[scheme, name](data, SCHEMES[scheme])
            seconds = time.perf_counter() - start
            loss, row = data.loss(model), journal.row(scheme, name)
            row["losses"].append(loss)
            row["seconds"].append(round(seconds, 2))
            row["bytes"] = size(model)
            journal.write(looked_at=LOOKED_AT, held_out=count)
            print(f"draw {seed}  {scheme:12} {name:24} loss {loss:.5f}  {seconds:.1f} s", flush=True)


# ---- time and memory


def cost(seed: int) -> dict[str, float]:
    """The seconds of GPTQ in this process, which has done nothing else, and the growth of its memory in bytes."""
    torch.set_num_threads(os.cpu_count() or 1)
    data = Data(seed)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before, start = _status("VmRSS"), time.perf_counter()
    algorithms.gptq(data.model, SCHEMES["int4 in 128"], data.looked_at, filter=ENCODER)
    seconds = time.perf_counter() - start
    own = sum(p.nbytes for p in Data(seed).model.parameters())
    return {"seconds": seconds, "growth": _status("VmHWM") - before, "model": own}


def _status(name: str) -> int:
    """A field of /proc/self/status, in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024


def costs(journal: Journal, draws: int) -> None:
    rows = []
    for seed in range(draws):
        command = [sys.executable, "-m", "benchmarks.algorithms", "--cost-of", str(seed)]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(ended.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    journal.write(cost={"threads": os.cpu_count(), "rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="formats, or format/algorithm, by their beginnings; all without one")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--cost", action="store_true", help="time and memory of GPTQ alone")
    parser.add_argument("--cost-of", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cost_of is not None:
        print(json.dumps(cost(given.cost_of)))
        return
    journal = Journal(RESULTS)
    if given.cost:
        costs(journal, given.draws)
        return
    wanted = [cell for cell in CELLS if not given.names or any("/".join(cell).startswith(n) for n in given.names)]
    measure(journal, wanted, given.draws)


if __name__ == "__main__":
    main()
