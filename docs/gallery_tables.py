"""The gallery: a picture of the values and errors of each format, and the table of errors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hop
from docs.drawing import DATA, GROUPED, INK, STYLE, WHOLE, png, pyplot
from hop.numerics.formats import FORMATS, Codebook, Format, Integer, PowerOfTwo
from hop.numerics.presets import PRESETS
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import AbsMean, Amax, MinMax, Rule
from tests.support import pages

SHAPE = (256, 1024)  # of the tensors that are quantized
GROUP = 32  # elements per scale; the other variant has one scale for the tensor


def bits_per_element(q: Quantizer) -> float:
    """Bits per element of a 1024 × 4096 tensor, scales included."""
    proto = hop.TensorProto((1024, 4096), quantizer=q)
    return sum(torch.Size(b.shape).numel() * b.dtype.itemsize * 8 for b in proto.buffers()) / (1024 * 4096)


@dataclass(frozen=True)
class Subject:
    """The content of one picture.

    Args:
        title: its title.
        numbers: the values an element can have, in units of `unit`, by label.
        quantizers: the quantizers whose error is shown, by label.
        signed: False for formats without negative values, which quantize magnitudes.
    """

    title: str
    numbers: Mapping[str, list[float]]
    unit: str
    quantizers: Mapping[str, Quantizer]
    signed: bool

    def of(self, data: str) -> str:
        """The name of the quantized data."""
        return data if self.signed else f"magnitudes of {data}"


def subjects() -> dict[str, Subject]:
    """Each element format, and each preset whose scales have their own format, by picture name."""
    found = {f.name: of_format(f) for f in FORMATS if not isinstance(f, PowerOfTwo)}
    for name, q in PRESETS.items():
        (dtype, _), *_ = q.stored().values()
        if dtype != torch.float32 and not q.stochastic and q.hadamard is None:
            found[name.lower()] = of_preset(name, q)
    return found


def of_format(f: Format) -> Subject:
    """A format with a plain scale: amax, min-max for unsigned codes, or the mean for a single magnitude."""
    rule: Rule = Amax()
    if isinstance(f, Integer) and f.low >= 0:
        rule = MinMax()
    elif len(f.numbers) <= 3:
        rule = AbsMean()
    zero = f.zero
    quantizers = {
        "one scale": Quantizer(f, (-1, -1), rule),
        f"one scale per {GROUP}": Quantizer(f, (1, GROUP), rule),
    }
    what = f"{f.bits} bits, {len(f.numbers)} values, scaled by {type(rule).__name__}"
    unit = "scales, from the zero point" if zero else "scales"
    signed = not (isinstance(f, Codebook) and f.min >= 0)
    return Subject(f"{f.name}: {what}", {"": [v - zero for v in f.numbers]}, unit, quantizers, signed)


def of_preset(name: str, q: Quantizer) -> Subject:
    """A preset: the values of blocks with three different amaxes."""
    numbers = {}
    for amax in (1.0, 0.3, 0.05):
        x = torch.zeros(q.block[0], 2 * q.block[1])  # one block has the tensor's amax, the other `amax`
        x[0, 0], x[0, -1] = 1.0, amax
        buffers = q.quantize(x)
        step = q.scale.scale_of([buffers[n] for n in q.stored()], q.format).flatten()[-1].item()
        numbers[f"amax {amax:g}"] = [v * step for v in q.format.numbers]
    block = "×".join(str(b) for b in q.block)
    title = f"{name}: {q.format.name} in blocks of {block}, {bits_per_element(q):.4g} bits with scales"
    return Subject(title, numbers, "amax of the tensor", {f"blocks of {block}": q}, True)


def data() -> dict[str, Tensor]:
    """The quantized tensors by name, with standard deviation 1."""
    rng = np.random.default_rng(0)
    drawn = {"normal": rng.standard_normal(SHAPE), "Student t, 3 degrees": rng.standard_t(3, SHAPE) / np.sqrt(3)}
    return {name: torch.from_numpy(x).to(torch.float32) for name, x in drawn.items()}


def errors(subject: Subject) -> Iterator[tuple[str, str, Tensor, Tensor, float]]:
    """For each tensor and quantizer: their labels, x, its error, and 10 log10(Σ x² / Σ error²)."""
    for name, x in data().items():
        x = x if subject.signed else x.abs()
        for label, q in subject.quantizers.items():
            error = hop.fake_quantize(q, x).double() - x.double()
            ratio = x.double().square().sum() / error.square().sum()
            yield name, label, x, error, 10 * torch.log10(ratio).item()


def gallery() -> str:
    """Two tables of errors, of formats and of presets, and all pictures."""
    finer, presets, pictures = [["format", "one scale", f"one scale per {GROUP}"]], [], []
    for name, subject in subjects().items():
        found = {(tensor, label): f"{ratio:.1f}" for tensor, label, _, _, ratio in errors(subject)}
        cells = [[found[tensor, label] for tensor in data()] for label in subject.quantizers]
        link = f"[{name}](#{name})" + ("" if subject.signed else ", of magnitudes")
        if len(cells) == 2:
            finer.append([link, *map(", ".join, cells)])
        else:
            presets.append([link, *subject.quantizers, *cells[0]])
        pictures.append(f"## {name}\n\n![values and errors of {name}](gallery/{name}.png)\n")
    header = ["preset", "scales", *(f"{name}, dB" for name in data())]
    return "\n".join([pages.table(finer), pages.table([header, *presets]), *pictures])


# ---- drawing


def draw(subject: Subject) -> bytes:
    """The picture as a reproducible PNG."""
    plot = pyplot()
    with plot.rc_context(STYLE):
        rulers = 0.25 + 0.22 * len(subject.numbers)
        figure = plot.figure(figsize=(8, 3.9 + 2 * rulers), dpi=120, layout="constrained")
        grid = figure.add_gridspec(3, 2, height_ratios=(rulers, rulers, 2.6))
        figure.suptitle(subject.title, fontsize=11, fontweight="bold")
        draw_numbers(figure.add_subplot(grid[0, :]), subject, logarithmic=False)
        draw_numbers(figure.add_subplot(grid[1, :]), subject, logarithmic=True)
        left = figure.add_subplot(grid[2, 0])
        draw_errors([left, figure.add_subplot(grid[2, 1], sharey=left)], subject)
        picture = png(figure)
        plot.close(figure)
    return picture


def draw_numbers(axes: Any, subject: Subject, *, logarithmic: bool) -> None:
    """One mark for each value, on a linear axis, or on a logarithmic one for positive values."""
    for row, numbers in enumerate(reversed(list(subject.numbers.values()))):
        shown = [v for v in numbers if v > 0 or not logarithmic]
        axes.vlines(shown, row - 0.35, row + 0.35, color=INK, linewidth=0.9)
    axes.set_ylim(-0.6, len(subject.numbers) - 0.4)
    axes.set_yticks(range(len(subject.numbers)), list(subject.numbers)[::-1])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    if logarithmic:
        axes.set_xscale("log")
    axes.set_xlabel(f"{'magnitude, logarithmic' if logarithmic else 'value'} ({subject.unit})")


def draw_errors(panels: list[Any], subject: Subject) -> None:
    """Relative error over magnitude, above the distribution of the data."""
    drawn = iter(panels)
    axes: dict[str, Any] = {}
    edges = np.logspace(-3, 2, 76)
    middles = np.sqrt(edges[1:] * edges[:-1])
    colors = dict(zip(subject.quantizers, (WHOLE, GROUPED) if len(subject.quantizers) > 1 else (GROUPED,), strict=True))
    for name, label, x, error, ratio in errors(subject):
        place = np.digitize(x.abs().numpy().ravel(), edges)
        count = np.bincount(place, minlength=77)[1:-1]
        if name not in axes:
            axes[name] = next(drawn)
            axes[name].set_title(subject.of(name))
            below = axes[name].twinx()
            below.fill_between(middles, count / count.max(), color=DATA, step="mid", linewidth=0)
            below.set_ylim(0, 2.5)
            below.axis("off")
            axes[name].set_zorder(below.get_zorder() + 1)
            axes[name].patch.set_visible(False)
        squares = np.bincount(place, error.square().numpy().ravel(), 77)[1:-1]
        sizes = np.bincount(place, x.double().square().numpy().ravel(), 77)[1:-1]
        known = count >= 8
        relative = 100 * np.sqrt(squares[known] / sizes[known])
        axes[name].plot(middles[known], relative, color=colors[label], linewidth=1.6, label=f"{label}: {ratio:.1f} dB")
    for panel in axes.values():
        panel.set(xscale="log", yscale="log", xlim=(1e-3, 1e2), ylim=(0.1, 300))
        panel.set_xlabel("magnitude of an element (standard deviations)")
        panel.set_yticks([0.1, 1, 10, 100], ["0.1 %", "1 %", "10 %", "100 %"])
        panel.set_xticks([1e-3, 1e-2, 0.1, 1, 10, 100], ["0.001", "0.01", "0.1", "1", "10", "100"])
        panel.minorticks_off()
        panel.grid(color=DATA, linewidth=0.6)
        panel.legend(loc="lower left", frameon=False, handlelength=1.4)
    panels[0].set_ylabel("RMS error / magnitude")
