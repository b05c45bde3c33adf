"""A perceptron of two int8 layers in onnxruntime, against eager mode: `python -m benchmarks.export_onnx`."""

import tempfile
import warnings

import torch
from torch import Tensor, nn

import hop
from benchmarks.timing import interleaved
from hop import presets

ROWS, WIDTH, HIDDEN, THREADS = 128, 1024, 4096, 2


class Perceptron(nn.Module):
    """Two linear layers of int8, with activations quantized by rows."""

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
    """The same in float32."""

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
    codes, floats = Perceptron(*weights).eval(), Float(*weights).eval()
    runs = {"float32, eager": lambda: floats(x), "int8, eager": lambda: codes(x)}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    kinds = {"float32": (floats, torch.uint8)} | {f"int8, weights={w}": (codes, w) for w in (torch.uint8, torch.int8)}
    with tempfile.TemporaryDirectory() as folder:
        for name, (model, w) in kinds.items():
            made = hop.export.to_onnx(torch.export.export(model, (x,)), weights=w)
            made.save(path := f"{folder}/model.onnx")
            session = onnxruntime.InferenceSession(path, options)
            feed = {session.get_inputs()[0].name: x.numpy()}
            if model is codes and not torch.equal(torch.from_numpy(session.run(None, feed)[0]), codes(x)):
                raise SystemExit(f"{name}: results differ from eager mode's")
            runs[f"{name}, onnxruntime"] = lambda session=session, feed=feed: session.run(None, feed)
        times = interleaved(list(runs.values()))
    for name, milliseconds in zip(runs, times, strict=True):
        print(f"{name:<45}{milliseconds:8.2f} ms")


if __name__ == "__main__":
    main()
