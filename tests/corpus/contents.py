"""The contents of a corpus, computed from given inputs: values, tensors, models, optimizers and programs.

Products are of numbers of few bits that lie close together, so that every sum of them is exact: their results are the
same bits with any kernel, on any machine.
"""

import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hop
import hop.optim
from hop import formats, layouts, presets, recipes, requantization, scale_rules, schemes
from hop.dispatch import hop as _hop
from hop.numerics.formats import E4M3, E5M2, INT8, UINT8, Codebook, Float, Integer, PowerOfTwo
from hop.numerics.hadamard import Hadamard
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Static
from tests.support.tensors import plain

aten = torch.ops.aten
FOLDER = Path(__file__).parent
ROWS, COLUMNS, BOTH = ("rowwise",), ("columnwise",), ("rowwise", "columnwise")
SHAPE, GROUPED = (3, 2, 48), (16, 32)  # of tensors, and of those with the Hadamard transform or a layout


# ---- numbers


def exact(seed: int, *shape: int) -> Tensor:
    """± n · 3 / 16, n from 4 to 7, 7 in each run of 16: the scales of int4 and, of the whole tensor, of NVFP4 are then
    powers of two, or three times one."""
    draw = random.Random(seed)
    x = torch.tensor([draw.choice((-1, 1)) * draw.randint(4, 7) * 3 / 16 for _ in range(torch.Size(shape).numel())])
    x[::16] = 7 * 3 / 16
    return x.reshape(shape)


def nasty(seed: int, *shape: int) -> Tensor:
    """Numbers of many sizes, whole rows of zeros, and of one of them alone; finite."""
    draw = random.Random(seed)
    x = torch.tensor([draw.gauss(0, 1) * 2.0 ** draw.randint(-12, 12) for _ in range(torch.Size(shape).numel())])
    x = x.reshape(shape)
    x[0] = 0.0
    x[1].view(-1)[3] = -0.0
    x[-1].view(-1)[:-1] = 0.0
    return x


# ---- values


def custom() -> dict[str, formats.Format]:
    """Formats that are spelled by their fields."""
    return {
        "integer": Integer("int3", 3, torch.int8, -4, 3),
        "float": Float("e3m2", 6, torch.uint8, exponent_bits=3, mantissa_bits=2, bias=3, largest=0x1F),
        "codebook": Codebook("half", 2, torch.uint8, (-1.0, -0.5, 0.5, 1.0)),
        "powers": PowerOfTwo("e5m0", 5, torch.uint8, bias=15),
    }


CONVENTIONS: dict[str, requantization.Requantization] = {
    "division": requantization.Division(),
    "reciprocal": requantization.Reciprocal(),
    "multiplier": requantization.FloatMultiplier(low=0.0),
    "multiplier_range": requantization.FloatMultiplier(low=-1.5, high=6.0),
    **{f"fixed_{r}": requantization.FixedPoint(rounding=r) for r in ("gemmlowp", "tflite", "away", "even")},
}


def quantizers() -> dict[str, Quantizer]:
    """The presets, and what they leave out: every rule with its fields, every layout, every requantization."""
    return {
        **presets.PRESETS,
        "amax_floor": Quantizer(INT8, (4, 8), scale_rules.Amax(floor=1e-3)),
        "stochastic": Quantizer(INT8, (1, -1), stochastic=True),
        "eps": Quantizer(E5M2, (1, -1), scale_rules.CurrentScaling(power_of_two=True, eps=0.5)),
        "block_floats": Quantizer(E4M3, (1, 16), scale_rules.BlockScaling(power_of_two=False)),
        "delayed": Quantizer(E5M2, scale=scale_rules.Delayed(margin=1, history=16, most_recent=True)),
        "mx_e5m0": Quantizer(custom()["float"], (1, 32), scale_rules.Microscaling(exponent=custom()["powers"])),  # type: ignore[arg-type]
        "two_level_block": Quantizer(E4M3, (2, 16), scale_rules.TwoLevel(outer=(-1, 16), inner=E5M2)),
        "signs": Quantizer(formats.E2M1, (1, 16), scale_rules.TwoLevel(), hadamard=Hadamard((1, -1, -1, 1))),
        "book": Quantizer(custom()["codebook"], (1, 16)),
        "int3": Quantizer(custom()["integer"], (1, -1)),
        "tiled": replace(presets.INT8_ROW, layout=layouts.Tiled()),
        "tiled_int4": replace(presets.INT4_32, layout=layouts.Tiled()),
        "tiled_columns": replace(presets.INT8_COLUMN, layout=layouts.Tiled(columns=True)),
        "decoded": replace(presets.MXFP8, layout=layouts.Decoded()),
        "decoded_nvfp4": replace(presets.NVFP4, layout=layouts.Decoded()),
        **{f"to_{name}": Quantizer(UINT8, scale=Static(True, c)) for name, c in CONVENTIONS.items()},
    }


# What is spelled, and of which there are no tensors: layouts that programs hold, and rules that other files bring.
SPELLED = {
    "stacked": replace(presets.INT8_ROW, layout=layouts.Stacked()),
    "summed": replace(presets.INT8_ROW, layout=layouts.Summed()),
    "planes": replace(presets.INT8_ROW, format=formats.INT5, layout=layouts.Planes()),
    "stored": Quantizer(formats.INT8, (1, 32), scale_rules.StoredScales()),
    "stored_offsets": Quantizer(formats.UINT5, (1, 32), scale_rules.StoredScales(torch.float16, offset=True)),
    "stored_codes": Quantizer(formats.INT6, (1, 16), scale_rules.StoredScales(formats.INT8, (1, 256))),
}

# What version 0.1 called them.
NAMED = {
    **{name: schemes.SCHEMES[name] for name in ("INT8_DYNAMIC", "INT8_STATIC", "INT8_DA_INT4_W")},
    "INT4_W": schemes.INT4_WEIGHT_32,
    "TERNARY_WEIGHT": schemes.INT8_DA_TERNARY_W,
    **{name: recipes.RECIPES[name] for name in ("INT8_TRAINING", "FP8_HYBRID", "FP8_DELAYED", "FP8_BLOCKWISE")},
    **{name: recipes.RECIPES[f"{name}_TRAINING"] for name in ("MXFP8", "NVFP4")},
}


def all_schemes() -> dict[str, hop.Scheme]:
    return {
        **NAMED,
        "original": replace(schemes.INT4_WEIGHT_32, backward="original"),
        "output": replace(schemes.INT8_DYNAMIC, output=presets.INT8_TENSOR_STATIC_AFFINE),
    }


def public_names() -> list[str]:
    """The names that docs/api documents."""
    pages = (FOLDER.parents[1] / "docs" / "api").glob("*.md")
    return sorted(name for page in pages for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)", page.read_text(), re.M))


# ---- tensors


def tensor_cases() -> Iterator[tuple[str, Quantizer, tuple[str, ...]]]:
    """The name of each tensor, its quantizer, and its copies."""
    for name, q in quantizers().items():
        yield f"{name}.rowwise", q, ROWS
        if name in presets.PRESETS and not q.flat:
            yield f"{name}.both", q, BOTH
    for name in ("INT8_ROW", "INT4_32", "MXFP8", "NVFP4"):
        yield f"{name}.columnwise", presets.PRESETS[name], COLUMNS


def input_of(q: Quantizer) -> str:
    """The input that a tensor of `q` is made from."""
    return "x.grouped" if q.hadamard is not None or q.layout is not None else "x"


def tensor(q: Quantizer, usages: tuple[str, ...], inputs: Mapping[str, Tensor]) -> hop.QuantizedTensor:
    """The tensor of a case."""
    x = inputs[input_of(q)].to(torch.bfloat16)
    given: dict[str, Tensor] = {}
    if q.scale.missing() is not None:
        given["scale"] = torch.tensor(0.25)
    if q.scale.has_zero_point() and given:
        given["zero_point"] = torch.tensor(3, dtype=q.format.dtype)
    noise = inputs[f"{input_of(q)}.noise"] if q.stochastic else None
    if q.layout is None:
        return hop.quantize(q, x, noise=noise, usages=usages, **given)
    plain = hop.quantize(replace(q, layout=None), x, noise=noise, **given)
    return plain.rebuilt(plain.quantizer.packed(plain.buffers(), plain.shape, q.layout), quantizer=q)


# ---- layers

LAYERS: dict[str, Callable[[], Any]] = {
    "linear": lambda: nn.Linear(32, 16),
    "conv1d": lambda: nn.Conv1d(4, 8, 3, padding=1),
    "conv2d": lambda: nn.Conv2d(4, 8, 3, padding="same"),
    "embedding": lambda: nn.Embedding(16, 32),
}
# Others, whose entries in a file have the form of these.
ALIKE = {
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.modules.linear.NonDynamicallyQuantizableLinear,
    *(function.float_type for function in hop.nn.layers.functions.FUNCTIONS),  # which save no codes
}
INPUTS = {"linear": (16, 32), "conv1d": (2, 4, 16), "conv2d": (2, 4, 4, 4)}


def layer_inputs() -> dict[str, Tensor]:
    made = {f"layer.{kind}": exact(i, *shape) for i, (kind, shape) in enumerate(INPUTS.items())}
    return made | {"layer.embedding": torch.arange(16).reshape(2, 8) // 2}


def converted(kind: str, scheme: hop.Scheme) -> Any:
    """A layer in a scheme, its weights few bits; None where it cannot run so."""
    layer = LAYERS[kind]()
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(exact(10 + i, *p.shape))
    model = nn.ModuleDict({"layer": layer})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "convert: no layer was converted")
        row = hop.nn.convert(model, scheme).hop_report.rows[0]
    return model["layer"] if row.scheme is not None else None


def layer_cases() -> Iterator[tuple[str, str, hop.Scheme]]:
    """The name of each layer that runs, its kind, its scheme."""
    for name, scheme in all_schemes().items():
        for kind in LAYERS:
            if converted(kind, scheme) is not None:
                yield f"{name}.{kind}", kind, scheme


def ready(kind: str, scheme: hop.Scheme, x: Tensor, *, is_frozen: bool, is_trained: bool = True) -> Any:
    """A layer whose scales are set: static ones by calibration, delayed ones by what a step of training sees."""
    layer = converted(kind, scheme)
    hop.nn.calibrate(layer, [x], progress=False)
    if is_trained:
        plain(layer(x)).sum().backward()
        hop.nn.advance(layer)
        layer.zero_grad()
    if is_frozen:
        hop.nn.freeze(layer)
    return layer.eval()


# ---- optimizers

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW8bit": lambda p: hop.optim.AdamW8bit(p, 0.01, min_numel=256),
    "AdamW4bit": lambda p: hop.optim.AdamW4bit(p, 0.01, min_numel=256),
    "AdamWFp8": lambda p: hop.optim.AdamWFp8(p, 0.01, min_numel=256),
    "Adam": lambda p: hop.optim.Adam(p, 0.01, min_numel=256, weight_decay=0.1, amsgrad=True),
    "Adam4": lambda p: hop.optim.Adam(p, 0.01, min_numel=256, amsgrad=True, state=hop.optim.BITS4),
    "AdamW8Fp8": lambda p: hop.optim.AdamW(p, 0.01, min_numel=256, state=hop.optim.BITS8_FP8),
    "AdamWZero": lambda p: hop.optim.AdamW(p, 0.01, min_numel=256, state={"exp_avg_sq": presets.STATE4_UNSIGNED_ZERO}),
    "AdamWFloats": lambda p: hop.optim.AdamW(p, 0.01, min_numel=256, state=None),
    "SGD": lambda p: hop.optim.SGD(p, 0.01, min_numel=256, momentum=0.9, nesterov=True),
    "SGD4": lambda p: hop.optim.SGD(p, 0.01, min_numel=256, momentum=0.9, dampening=0.1, state=hop.optim.BITS4),
    "Lion": lambda p: hop.optim.Lion(p, 0.01, min_numel=256, weight_decay=0.1),
    "LionStochastic": lambda p: hop.optim.Lion(
        p, 0.01, min_numel=256, state=hop.optim.FP8, stochastic_rounding=True, seed=5
    ),
}


def parameters(inputs: Mapping[str, Tensor]) -> list[nn.Parameter]:
    """Two parameters: one large enough for codes, one not."""
    dtype = torch.bfloat16
    return [nn.Parameter(inputs[f"parameter.{i}"].to(dtype)) for i in range(2)]


def step(optimizer: Any, inputs: Mapping[str, Tensor], number: int) -> None:
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        p.grad = (inputs[f"gradient.{i}"] * (-1) ** number / (number + 1)).to(p.dtype)
    optimizer.step()


CHECKPOINTED = "AdamW8bit"


class Trained(nn.Module):
    """The model that the optimizer of a distributed checkpoint trains."""

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.large, self.small = parameters(inputs)


# ---- programs


class OutDtype(nn.Module):
    """hop.out_dtype."""

    def forward(self, x: Tensor) -> list[Tensor]:
        i = (x * (16 / 3)).round().to(torch.int8)
        image = i.reshape(2, 4, 8, 8)
        return [
            hop.out_dtype(aten.mm.default, torch.int32, i, i.t()),
            hop.out_dtype(aten.linear.default, torch.int32, i, i),
            hop.out_dtype(aten.mm.default, torch.float32, x.bfloat16(), x.bfloat16().t()),
            hop.out_dtype(aten.conv2d.default, torch.int32, image, image[:, :, :3, :3], None, [1, 1], [1, 1]),
            hop.out_dtype(aten.add.Tensor, torch.int32, i, i, alpha=3),
            hop.out_dtype(aten.sum.dim_IntList, torch.int32, i, [1]),
        ]


class Quantize(nn.Module):
    """hop.quantize, hop.dequantize and hop.fake_quantize; hop.noise."""

    def forward(self, x: Tensor, scale: Tensor) -> list[Tensor]:
        found = []
        for q in (presets.INT8_ROW_AFFINE, presets.INT4_32, presets.MXFP8, presets.NVFP4, presets.FP8_128X128):
            found += [hop.dequantize(hop.quantize(q, x)), hop.fake_quantize(q, x)]
        static, point = presets.INT8_TENSOR_STATIC_AFFINE, torch.full((), 3, dtype=torch.int8)
        found.append(hop.dequantize(hop.quantize(static, x, scale=scale, zero_point=point), torch.bfloat16))
        noise = hop.noise(torch.full((), 7, dtype=torch.int64), x.shape, bits=8)
        return [*found, hop.fake_quantize(presets.NVFP4_STOCHASTIC, x, noise=noise)]


class Scaled(nn.Module):
    """hop.scaled of quantized weights and inputs, to floats and to codes."""

    def __init__(self) -> None:
        super().__init__()
        w = exact(20, 16, 32)
        for name in ("INT8_ROW", "INT4_32", "FP8_ROW", "MXFP8", "NVFP4"):
            self.register_parameter(name, nn.Parameter(hop.quantize(presets.PRESETS[name], w), requires_grad=False))

    def forward(self, x: Tensor, scale: Tensor) -> list[Tensor]:
        found = []
        for lhs, rhs in (
            ("INT8_ROW_AFFINE", self.INT8_ROW),
            ("INT8_ROW", self.INT4_32),
            ("FP8_ROW", self.FP8_ROW),
            ("MXFP8", self.MXFP8),
            ("NVFP4", self.NVFP4),
        ):
            q = hop.quantize(presets.PRESETS[lhs], x)
            found.append(hop.scaled(aten.linear.default, torch.float32, q, rhs))
        found.append(hop.scaled(aten.mm.default, torch.float32, hop.quantize(presets.INT8_ROW, x), self.INT8_ROW.t()))
        found.append(hop.scaled(aten.linear.default, torch.bfloat16, hop.quantize(presets.INT8_ROW, x), self.INT8_ROW))
        given = {"output_scale": scale, "output_zero_point": torch.full((), 100, dtype=torch.uint8)}
        q = hop.quantize(presets.INT8_TENSOR, x)
        for convention in CONVENTIONS.values():
            codes = Quantizer(UINT8, scale=Static(True, convention))
            found.append(hop.dequantize(hop.scaled(aten.linear.default, codes, q, self.INT8_ROW, **given)))
        return found


class Quantized(nn.Module):
    """hop.quantized in schemes."""

    def forward(self, x: Tensor, scale: Tensor) -> list[Tensor]:
        w = x * -0.5
        given = hop.Scales(output=scale, output_zero_point=torch.full((), 3.0))
        return [
            *(
                hop.quantized(aten.mm.default, NAMED[name], x, w.t())
                for name in ("INT8_DYNAMIC", "INT8_DA_INT4_W", "INT4_W", "FP8_BLOCKWISE", "MXFP8", "TERNARY_WEIGHT")
            ),
            hop.dequantize(hop.quantized(aten.linear.default, all_schemes()["output"], x, w, scales=given)),
        ]


class Chain(nn.Module):
    """Operators between products, on quantized tensors."""

    def forward(self, x: Tensor) -> list[Tensor]:
        q = hop.quantize(presets.INT8_TENSOR_AFFINE, x)
        half, other = q[:8], hop.quantize(presets.INT8_ROW, x)[4:12].t()
        packed = hop.unpack(hop.pack(hop.quantize(presets.INT8_ROW, x)))
        return [
            hop.scaled(aten.relu.default, torch.float32, half),
            hop.scaled(aten.add.Tensor, torch.float32, q, q),
            hop.dequantize(half),
            hop.dequantize(other),
            hop.dequantize(packed),
        ]


class Codes(nn.Module):
    """hop.from_codes: codes in, codes out."""

    def forward(self, x: Tensor, scale: Tensor) -> list[Tensor]:
        codes = (x * (16 / 3)).round().to(torch.int8)
        static = Quantizer(formats.INT8, (1, -1), Static(affine=True))
        lhs = hop.from_codes(static, codes, scale, torch.full((1,), 3, dtype=torch.int8))
        rhs = hop.from_codes(presets.INT8_ROW, codes, torch.full((len(x),), 0.25), axis=0)
        given = {"output_scale": scale, "output_zero_point": torch.full((), 100, dtype=torch.uint8)}
        out = hop.scaled(aten.linear.default, Quantizer(UINT8, scale=Static(True)), lhs, rhs, **given)
        return [hop.dequantize(out)]


class Conditional(nn.Module):
    """A weight that the branches of a conditional read, and one that they give."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(hop.quantize(presets.INT8_ROW, x), requires_grad=False)

    def forward(self, x: Tensor) -> list[Tensor]:
        w = self.weight
        (y,) = torch.cond(
            x[0, 0] > 0,
            lambda x: (hop.quantized(aten.linear.default, schemes.INT8_DYNAMIC, x, w),),
            lambda x: (hop.quantized(aten.linear.default, schemes.INT8_DYNAMIC, x, w) * 2,),
            (x,),
        )
        return [y]


class Layers(nn.Module):
    """Layers of one kind in several schemes."""

    def __init__(self, kind: str, names: Iterable[str], x: Tensor, *, is_frozen: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ready(kind, all_schemes()[name], x, is_frozen=is_frozen) for name in names)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [plain(layer(x)) for layer in self.layers]


# Programs of layers: the kind, the schemes, whether they are frozen.
SAVED: dict[str, tuple[str, Iterable[str], bool]] = {
    "linear_trained": ("linear", ("INT8_STATIC", "FP8_DELAYED", "output"), False),
    "linear_frozen": ("linear", all_schemes(), True),
    "conv1d_frozen": ("conv1d", ("INT8_DYNAMIC",), True),
    "conv2d_frozen": ("conv2d", ("INT8_STATIC", "FP8_HYBRID"), True),
    "embedding_frozen": ("embedding", ("INT4_W", "NVFP4"), True),
}

# Which no saved program holds: the parts of a backward.
UNSAVED = {"hop_quantized_gradient", "hop_linear_forward", "hop_linear_backward"}


def programs(inputs: Mapping[str, Tensor]) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    """The name of each program, what it is made of, and the names of its inputs."""
    yield "out_dtype", OutDtype(), ("layer.linear",)
    yield "quantize", Quantize(), ("x.grouped", "scale")
    yield "scaled", Scaled(), ("layer.linear", "scale")
    yield "quantized", Quantized(), ("layer.linear", "scale")
    yield "chain", Chain(), ("x.grouped",)
    yield "codes", Codes(), ("layer.linear", "scale")
    yield "conditional", Conditional(inputs["layer.linear"]), ("layer.linear",)
    for name, (kind, names, is_frozen) in SAVED.items():
        x = f"layer.{kind}"
        yield name, Layers(kind, names, inputs[x], is_frozen=is_frozen), (x,)


LOWERED = {"quantize", "scaled"}  # those that are saved without tensor subclasses, too


def without_paths(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program, without the paths of the machine that it was made on."""
    for graph in graphs(program):
        for node in graph.nodes:
            node.meta.pop("stack_trace", None)
    return program


def operators(program: torch.export.ExportedProgram) -> set[str]:
    """The operators of ours that a program holds."""
    return {str(node.target) for graph in graphs(program) for node in graph.nodes} & {str(op) for op in _hop.hops}


def graphs(program: torch.export.ExportedProgram) -> list[torch.fx.Graph]:
    """The graph of a program, and those of the branches in it."""
    return [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]


# ---- inputs


def all_inputs() -> dict[str, Tensor]:
    draw = random.Random(99)

    def noise(x: Tensor) -> Tensor:
        return torch.tensor([draw.randrange(256) for _ in range(x.numel())], dtype=torch.uint8).reshape(x.shape)

    x, grouped = nasty(1, *SHAPE), nasty(2, *GROUPED)
    return {
        "x": x,
        "x.noise": noise(x),
        "x.grouped": grouped,
        "x.grouped.noise": noise(grouped),
        **layer_inputs(),
        "scale": torch.tensor(0.75),
        **{f"parameter.{i}": nasty(30 + i, n, 48) for i, n in enumerate((9, 3))},
        **{f"gradient.{i}": nasty(40 + i, n, 48) for i, n in enumerate((9, 3))},
    }
