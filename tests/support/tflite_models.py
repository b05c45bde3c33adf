# pyright: reportMissingImports=false
"""Networks as quantize and dequantize nodes, and what LiteRT's reference kernels make of their integer programs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torchao  # noqa: F401  (it registers quantized_decomposed)
from torch import Tensor, nn
from torch.export import ExportedProgram

from hop.export.targets.tflite import TfliteModel

qd = torch.ops.quantized_decomposed


def both(x: Tensor, scale: float, zero: int) -> Tensor:
    """x quantized to int8 and dequantized."""
    codes = qd.quantize_per_tensor.default(x, scale, zero, -128, 127, torch.int8)
    return qd.dequantize_per_tensor.default(codes, scale, zero, -128, 127, torch.int8)


def wide(x: Tensor, scale: float) -> Tensor:
    """x as int16 codes mean it."""
    codes = qd.quantize_per_tensor.default(x, scale, 0, -(2**15), 2**15 - 1, torch.int16)
    return qd.dequantize_per_tensor.default(codes, scale, 0, -(2**15), 2**15 - 1, torch.int16)


def unsigned(x: Tensor, scale: float, zero: int) -> Tensor:
    """x as uint8 codes mean it, which are 128 more than those of int8."""
    codes = qd.quantize_per_tensor.default(x, scale, zero + 128, 0, 255, torch.uint8)
    return qd.dequantize_per_tensor.default(codes, scale, zero + 128, 0, 255, torch.uint8)


class Weights(nn.Module):
    """A random weight of int8, with a scale for each output channel, which is the dimension `channel`, or one; and a
    bias."""

    def __init__(self, shape: Sequence[int], per_channel: bool = True, bias: bool = True, channel: int = 0) -> None:
        super().__init__()
        self.per_channel, self.channel, count = per_channel, channel, shape[channel]
        spread = float(np.prod(shape[1:])) ** -0.5 / 64
        self.codes = nn.Buffer(torch.randint(-127, 128, tuple(shape), dtype=torch.int8))
        self.scales = nn.Buffer((torch.rand(count) + 0.5) * spread)
        self.zeros = nn.Buffer(torch.zeros(count, dtype=torch.int64))
        self.scale = float(torch.tensor(spread * 1.1))
        self.bias = nn.Buffer(torch.randn(count)) if bias else None

    def forward(self) -> Tensor:
        if self.per_channel:
            units = self.scales, self.zeros, self.channel
            return qd.dequantize_per_channel.default(self.codes, *units, -127, 127, torch.int8)
        return qd.dequantize_per_tensor.default(self.codes, self.scale, 0, -127, 127, torch.int8)


class Recorder(torch.fx.Interpreter):
    """Record the value of each node of a program."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.found: dict[str, Any] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        made = super().run_node(n)
        self.found[n.name] = made[0] if isinstance(made, tuple | list) and made else made
        return made


def codes_of(program: ExportedProgram, *inputs: Tensor) -> dict[str, Tensor]:
    """The codes, int8, of each node of a program."""
    signature, held = program.graph_signature, {**program.constants, **program.state_dict}
    given = iter(inputs)
    args = [
        held[spec.target] if spec.target is not None and spec.kind.name != "USER_INPUT" else next(given)
        for spec in signature.input_specs
    ]
    recorder = Recorder(program.graph_module)
    with torch.no_grad():
        recorder.run(*args)
    return {n: x for n, x in recorder.found.items() if isinstance(x, Tensor) and x.dtype == torch.int8}


def run(model: TfliteModel, inputs: Mapping[str, Tensor], reference: bool = True) -> dict[str, np.ndarray]:
    """Every tensor of a file by name, from LiteRT's reference kernels or its optimized ones."""
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    kind = OpResolverType.BUILTIN_REF if reference else OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = Interpreter(
        model_content=model.buffer, experimental_op_resolver_type=kind, experimental_preserve_all_tensors=True
    )
    interpreter.allocate_tensors()
    places = interpreter.get_signature_list()["serving_default"]
    details = {d["name"]: d for d in interpreter.get_tensor_details()}
    assert set(places["inputs"]) == set(inputs)
    for d in interpreter.get_input_details():
        interpreter.set_tensor(d["index"], inputs[d["name"]].numpy())
    interpreter.invoke()
    return {n: interpreter.get_tensor(d["index"]) for n, d in details.items() if n}


def differences(
    model: TfliteModel, codes: Mapping[str, Tensor], found: Mapping[str, np.ndarray]
) -> dict[str, tuple[int, int]]:
    """For each node: how many of its codes differ from the file's, and how many there are."""
    counts: dict[str, tuple[int, int]] = {}
    for node, (name, order) in model.tensors.items():
        if node in codes:
            own = codes[node].permute(order).numpy() if codes[node].dim() == len(order) else codes[node].numpy()
            assert own.shape == found[name].shape, (node, name, own.shape, found[name].shape)
            counts[node] = int((own != found[name]).sum()), own.size
    return counts


class Point(nn.Module):
    """Where activations are quantized: by the range that it saw first, or by `scale` and `zero`. With `bits` 16 shares
    are in units of 2^-15."""

    def __init__(self, scale: float = 0.0, zero: int = 0) -> None:
        super().__init__()
        self.scale, self.zero, self.bits = scale, zero, 8
        self.both = both

    def widen(self) -> None:
        """Codes of 16 bits from now on."""
        self.scale, self.zero, self.bits = (2.0**-15 if self.scale == 1 / 256 else 0.0), 0, 16

    def forward(self, x: Tensor) -> Tensor:
        if self.bits == 16:
            self.scale = self.scale or float(torch.tensor(max(float(x.abs().max()), 1e-3) / (2**15 - 1)))
            return wide(x, self.scale)
        if not self.scale:
            low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
            self.scale = float(torch.tensor(max(high - low, 1e-3) / 255))
            self.zero = round(-128 - low / self.scale)
        return self.both(x, self.scale, self.zero)


class Step(nn.Module):
    """A function between two quantizations."""

    def __init__(self, function: Any, out: tuple[float, int], weight: Weights | None = None) -> None:
        super().__init__()
        self.function, self.out, self.weight = function, out, weight

    def forward(self, *inputs: Tensor) -> Tensor:
        given = [both(x, 0.03, 5) if x.is_floating_point() else x for x in inputs]
        more = [] if self.weight is None else [self.weight(), self.weight.bias]
        return both(self.function(*given, *more), *self.out)


class Layer(nn.Module):
    """A convolution with a range of its result, and its quantization."""

    def __init__(self, cin: int, cout: int, kernel: int = 3, high: float | None = 6.0, **options: Any) -> None:
        super().__init__()
        self.weight = Weights((cout, cin // options.get("groups", 1), kernel, kernel))
        self.options, self.high, self.point = {"padding": kernel // 2, **options}, high, Point()

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.conv2d(x, self.weight(), self.weight.bias, **self.options)
        if self.high is not None:
            y = nn.functional.relu6(y) if self.high == 6.0 else y.relu()
        return self.point(y)


class Head(nn.Module):
    """A mean over the picture, a fully connected layer, and shares."""

    def __init__(self, features: int, classes: int = 10, per_channel: bool = True, mean: str = "mean") -> None:
        super().__init__()
        self.weight, self.mean = Weights((classes, features), per_channel), mean
        self.points = nn.ModuleList([Point(), Point(), Point(1 / 256, -128)])

    def forward(self, x: Tensor) -> Tensor:
        means = {"mean": lambda x: x.mean((2, 3)), "pool": lambda x: nn.functional.adaptive_avg_pool2d(x, 1).flatten(1)}
        y = self.points[0](means[self.mean](x))
        y = self.points[1](nn.functional.linear(y, self.weight(), self.weight.bias))
        return self.points[2](y.softmax(-1))


class Network(nn.Sequential):
    """Layers after the quantization of the input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(Point(), *layers)


class Residual(nn.Module):
    """x + f(x), then relu, or not."""

    def __init__(self, *layers: nn.Module, relu: bool = True) -> None:
        super().__init__()
        self.layers, self.point, self.relu = nn.Sequential(*layers), Point(), relu

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.layers(x)
        return self.point(y.relu() if self.relu else y)


class MaximumPool(nn.Module):
    def __init__(self, kernel: int, stride: int, padding: int = 0) -> None:
        super().__init__()
        self.given, self.point = (kernel, stride, padding), Point()

    def forward(self, x: Tensor) -> Tensor:
        return self.point(nn.functional.max_pool2d(x, *self.given))


def inverted(cin: int, cout: int, stride: int, expand: int) -> nn.Module:
    """MobileNetV2's block."""
    wide = cin * expand
    layers = [Layer(cin, wide, 1)] if expand > 1 else []
    layers += [Layer(wide, wide, stride=stride, groups=wide), Layer(wide, cout, 1, high=None)]
    return Residual(*layers, relu=False) if stride == 1 and cin == cout else nn.Sequential(*layers)


def mobilenet(width: int = 1) -> nn.Module:
    """The shape of MobileNetV2: its rows of expansion, channels, repetitions and strides; channels by `width` / 4."""
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    at = 32 * width // 4
    layers: list[nn.Module] = [Layer(3, at, stride=2)]
    for expand, channels, count, stride in rows:
        for i in range(count):
            cout = channels * width // 4
            layers.append(inverted(at, cout, stride if i == 0 else 1, expand))
            at = cout
    return Network(*layers, Layer(at, 1280 * width // 4, 1), Head(1280 * width // 4, 100, mean="pool"))


class Dense(nn.Module):
    """A fully connected layer, with a function after it, and its quantization."""

    def __init__(self, cin: int, cout: int, function: Any = None, point: Any = None) -> None:
        super().__init__()
        self.weight, self.function = Weights((cout, cin)), function
        self.points = nn.ModuleList([Point(), point or Point()])

    def forward(self, x: Tensor) -> Tensor:
        y = self.points[0](nn.functional.linear(x, self.weight(), self.weight.bias))
        return y if self.function is None else self.points[1](self.function(y))


class Attention(nn.Module):
    """Attention of several heads, of a product of queries and keys and one of shares and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.layers = heads, nn.ModuleList(Dense(width, width) for _ in range(4))
        self.points = nn.ModuleList([Point(), Point(1 / 256, -128), Point()])

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            layer(x).reshape(batch, length, self.heads, -1).permute(0, 2, 1, 3).reshape(batch * self.heads, length, -1)
            for layer in self.layers[:3]
        )
        shares = self.points[1](self.points[0](torch.bmm(q, k.transpose(1, 2))).softmax(-1))
        y = self.points[2](torch.bmm(shares, v)).reshape(batch, self.heads, length, -1).permute(0, 2, 1, 3)
        return self.layers[3](y.reshape(batch, length, width))


class Tokens(nn.Module):
    """The mean over tokens, classes, and shares."""

    def __init__(self, width: int, classes: int = 10) -> None:
        super().__init__()
        self.point, self.layer = Point(), Dense(width, classes, lambda y: y.softmax(-1), Point(1 / 256, -128))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.point(x.mean(1)))


def transformer(width: int = 32, depth: int = 2, function: Any = nn.functional.gelu) -> nn.Module:
    """An encoder, without norms, which TFLite has not in int8."""
    blocks = [
        block
        for _ in range(depth)
        for block in (
            Residual(Attention(width, 4), relu=False),
            Residual(Dense(width, 4 * width, function), Dense(4 * width, width), relu=False),
        )
    ]
    return Network(*blocks, Tokens(width))


def widened(model: nn.Module) -> nn.Module:
    """The model with activations of 16 bits."""
    for module in model.modules():
        if isinstance(module, Point):
            module.widen()
    return model


def of_uint8(model: nn.Module) -> nn.Module:
    """The model with activations of uint8."""
    for module in model.modules():
        if isinstance(module, Point):
            module.both = unsigned
    return model


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Networks by name, each with the shape of its input."""
    separable = [layer for _ in range(4) for layer in (Layer(24, 24, groups=24, high=0.0), Layer(24, 24, 1, high=0.0))]
    return {
        "digits": (Network(Layer(1, 16), MaximumPool(2, 2), Layer(16, 32), MaximumPool(2, 2), Head(32)), (64, 1, 8, 8)),
        "residual": (
            Network(
                Layer(3, 16, 7, stride=2, high=0.0),
                MaximumPool(3, 2, 1),
                Residual(Layer(16, 16, high=0.0), Layer(16, 16, high=None)),
                Layer(16, 32, stride=2, high=0.0),
                Residual(Layer(32, 32, high=0.0), Layer(32, 32, high=None)),
                Head(32, per_channel=False, mean="pool"),
            ),
            (4, 3, 40, 40),
        ),
        "separable": (Network(Layer(1, 24, 5, stride=2, high=0.0), *separable, Head(24, 12)), (4, 1, 49, 10)),
        "mobilenet": (mobilenet(), (1, 3, 96, 96)),
        "transformer": (transformer(), (4, 12, 32)),
    }
