"""Report: how each weight of a converted model was handled."""

from dataclasses import dataclass, replace

from torch import nn

from hop.nn.contexts import WEIGHT
from hop.nn.layers.base import modules_of, spelled
from hop.nn.models.speeds import slower
from hop.nn.weights.holders import holder_of
from hop.numerics.attention_schemes import AttentionScheme
from hop.numerics.schemes import Scheme


@dataclass(frozen=True)
class Conversion:
    """The result for one layer, or for a parameter outside of all known layers."""

    name: str
    type: str  # of the float layer, or of the module that owns the parameter
    scheme: Scheme | AttentionScheme | None  # None: left in floats
    reason: str = ""  # why it was left in floats, or another remark
    parameters: int = 0  # floating-point parameters of this row; 0 if another row counts them
    quantized: int = 0  # how many of them are quantized (a bias never is)
    bytes: int = 0  # of its tensors in the checkpoint that quantize_folder wrote; 0 elsewhere
    error: float | None = None  # of its weight, as root mean square and share of the weight's; None if not measured


@dataclass(frozen=True)
class Report:
    """The result of `convert`, available as `model.hop_report`. str() formats it as a table.

    Every floating-point parameter is counted in exactly one row: its layer's, or one for the parameter alone.
    """

    rows: tuple[Conversion, ...]
    unused: tuple[str, ...]  # selectors whose layers were all matched by earlier rules

    @property
    def converted(self) -> int:
        """The number of converted layers."""
        return sum(row.scheme is not None for row in self.rows)

    @property
    def parameters(self) -> int:
        """The number of floating-point parameters of the model."""
        return sum(row.parameters for row in self.rows)

    @property
    def quantized(self) -> int:
        """The number of parameters that are quantized."""
        return sum(row.quantized for row in self.rows)

    @property
    def summary(self) -> str:
        """One line with the number and share of quantized parameters."""
        of = self.parameters
        return f"{self.quantized:,} of {of:,} parameters quantized ({_share(self.quantized, of)})"

    def __str__(self) -> str:
        heads, own = ["layer", "type", "parameters"], any(row.bytes for row in self.rows)
        heads += ["bytes", "error"] if own else []
        table = [[*heads, "scheme"]]
        for r in self.rows:
            measured = [f"{r.bytes:,}", "" if r.error is None else f"{100 * r.error:.2f} %"] if own else []
            table.append([r.name or "(model)", r.type, self._counted(r), *measured, _said(r)])
        widths = [max(len(row[i]) for row in table) for i in range(len(heads))]
        lines = [
            "  ".join(f"{x:{'<' if i < 2 else '>'}{w}}" for i, (x, w) in enumerate(zip(row[:-1], widths, strict=True)))
            + f"  {row[-1]}"
            for row in table
        ]
        schemes = {spelled(r.scheme): r.scheme for r in self.rows if isinstance(r.scheme, Scheme)}
        lines += [f"{name}: {_MIXES}" for name, scheme in schemes.items() if scheme.mixes_rows()]
        lines += [f"{name}: {text}" for name, scheme in schemes.items() if (text := slower(scheme))]
        lines += [f"earlier rules apply to every layer that {selector} matches" for selector in self.unused]
        return "\n".join([*lines, self.summary])

    def _counted(self, row: Conversion) -> str:
        return f"{row.parameters:,} {_share(row.parameters, self.parameters):>7}" if row.parameters else ""


_MIXES = (
    "one scale serves all rows of an input, so a row's result depends on its batch; schemes such as "
    "FP8_DYNAMIC_ROW and NVFP4_DYNAMIC_ROW have one for each row"
)


def counted(model: nn.Module, rows: list[Conversion]) -> tuple[Conversion, ...]:
    """Add parameter counts to the rows of layers, and a row for each parameter outside of them."""
    modules, seen = dict(modules_of(model, every_name=True)), set[int]()
    result: list[Conversion] = []
    names = {row.name for row in rows}
    for row in rows:
        module, is_quantized = modules[row.name], isinstance(row.scheme, Scheme) and row.scheme.rhs is not None
        prefix = f"{row.name}." if row.name else ""
        own = {
            name: p
            for name, p in module.named_parameters()
            if p.is_floating_point() and id(p) not in seen and _row_of(f"{prefix}{name}", names) == row.name
        }
        sizes = {name: p.numel() for name, p in own.items()}
        seen |= {id(p) for p in own.values()}
        holder = holder_of(module)
        weights = getattr(module, "weight_names", (WEIGHT,)) if holder is None else holder.names
        # names of a recomputed weight's parts
        starts = tuple(start for name in weights for start in (f"{name}_", f"parametrizations.{name}."))
        made = [name for name in sizes if name in weights or name.startswith(starts)]
        quantized = sum(sizes[name] for name in made) if is_quantized else 0
        result.append(replace(row, parameters=sum(sizes.values()), quantized=quantized))
    for name, p in model.named_parameters():
        if id(p) not in seen and p.is_floating_point():
            module = modules[name.rpartition(".")[0]]
            result.append(Conversion(name, type(module).__name__, None, "not the weight of a known layer", p.numel()))
    return tuple(result)


def _row_of(parameter: str, names: set[str]) -> str:
    """The innermost module of `names` that contains a parameter."""
    path = parameter.rpartition(".")[0]
    while path and path not in names:
        path = path.rpartition(".")[0]
    return path


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"


def _said(row: Conversion) -> str:
    if row.scheme is None:
        return f"- {row.reason}"
    named = spelled(row.scheme)
    return f"{named} ({row.reason})" if row.reason else named
