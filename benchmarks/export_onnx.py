"""An MLP and MiniLM in onnxruntime, int8 against float32: `python -m benchmarks.export_onnx`."""

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import hop
from hop import presets

ROWS, WIDTH, HIDDEN, THREADS = 128, 1024, 4096, 1
WEIGHTS = (None, torch.uint8, torch.int8)


class Perceptron(nn.Module):
    """Two int8 linear layers, with activations quantized by rows."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        for name, w in (("first", first), ("second", second)):
            setattr(self, name, nn.Parameter(hop.pack(hop.quantize(presets.INT8_ROW, w)), requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        for i, w in enumerate((self.first, self.second)):
            x = hop.quantize(presets.INT8_ROW, x.relu() if i else x)
            x = hop.scaled(torch.ops.aten.linear.default, torch.float32, x, w)
        return x


class Float(nn.Module):
    """The same layers in float32."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.linear(x, self.first).relu(), self.second)


def main() -> None:
    import onnxruntime

    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")
    x, weights = torch.randn(ROWS, WIDTH), (torch.randn(HIDDEN, WIDTH) / 32, torch.randn(WIDTH, HIDDEN) / 64)
    encoder, quantized, sentences = _minilm()
    models = {
        "perceptron": (Float(*weights).eval(), Perceptron(*weights).eval(), (x,)),
        "MiniLM": (encoder, quantized, sentences),
    }
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.log_severity_level = 3
    for title, (floats, codes, inputs) in models.items():
        runs: dict[str, Callable[[], object]] = {}
        for name, model, w in (("float32", floats, None), *((f"int8, weights={w}", codes, w) for w in WEIGHTS)):
            with tempfile.TemporaryDirectory() as folder:
                made = hop.export.to_onnx(torch.export.export(model, inputs), weights=w)
                made.save(path := f"{folder}/model.onnx")
                session = onnxruntime.InferenceSession(path, options)
            feed = {i.name: t.numpy() for i, t in zip(session.get_inputs(), inputs, strict=True)}
            if isinstance(model, Perceptron) and not torch.equal(
                torch.from_numpy(session.run(None, feed)[0]), model(x)
            ):
                raise SystemExit(f"{name}: results differ from eager mode's")
            runs[name] = lambda session=session, feed=feed: session.run(None, feed)
        times = _processor_times(list(runs.values()))
        for name, milliseconds in zip(runs, times, strict=True):
            print(f"{title:<12}{name:<32}{milliseconds:8.2f} ms  {milliseconds / times[0]:.2f} of float32")


def _minilm() -> tuple[nn.Module, nn.Module, tuple[Tensor, ...]]:
    """The encoder, its int8 version, and a batch of sentences."""
    from examples.quantized_bert import FORMS, Embedder, load, quantize

    encoder, batches = load()
    return Embedder(encoder).eval(), Embedder(quantize(encoder, FORMS["int8"])).eval(), batches[0]


def _processor_times(functions: Sequence[Callable[[], object]], rounds: int = 15) -> list[float]:
    """Median processor times in milliseconds, in turns; processor time excludes other processes."""
    taken: list[list[float]] = [[] for _ in functions]
    for round_ in range(rounds + 1):
        for function, times in zip(functions, taken, strict=True):
            start = time.process_time()
            function()
            if round_:  # the first is a warm-up
                times.append(time.process_time() - start)
    return [statistics.median(times) * 1e3 for times in taken]


if __name__ == "__main__":
    main()
