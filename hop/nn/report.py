"""Report: what became of the weights of a model that was converted."""

from dataclasses import dataclass, replace

from torch import nn

from hop.nn.contexts import WEIGHT
from hop.nn.holders import holder_of
from hop.nn.layer import modules_of, spelled
from hop.numerics.attention_schemes import AttentionScheme
from hop.numerics.schemes import Scheme


@dataclass(frozen=True)
class Conversion:
    """What became of one layer, or of a parameter that belongs to none."""

    name: str
    type: str  # of the layer before, or of the module that holds the parameter
    scheme: Scheme | AttentionScheme | None  # None: it was left in floats
    reason: str = ""  # why
    parameters: int = 0  # its own, floating point; 0 where another row has counted them
    quantized: int = 0  # how many of them are quantized: a bias stays in floats


@dataclass(frozen=True)
class Report:
    """What `convert` did, as `model.hop_report`; str() is a table.

    Every floating-point parameter is in a row: those of layers in theirs, others in one of their own."""

    rows: tuple[Conversion, ...]
    unused: tuple[str, ...]  # selectors of which earlier rules took every layer

    @property
    def converted(self) -> int:
        """How many layers."""
        return sum(row.scheme is not None for row in self.rows)

    @property
    def parameters(self) -> int:
        """How many floating-point parameters the model has."""
        return sum(row.parameters for row in self.rows)

    @property
    def quantized(self) -> int:
        """How many of them are weights that are quantized."""
        return sum(row.quantized for row in self.rows)

    @property
    def summary(self) -> str:
        """One line: how many parameters of all."""
        of = self.parameters
        return f"{self.quantized:,} of {of:,} parameters quantized ({_share(self.quantized, of)})"

    def __str__(self) -> str:
        table = [("layer", "type", "parameters", "scheme")]
        table += [(r.name or "(model)", r.type, self._counted(r), _said(r)) for r in self.rows]
        widths = [max(len(row[i]) for row in table) for i in range(3)]
        lines = [f"{a:{widths[0]}}  {b:{widths[1]}}  {c:>{widths[2]}}  {d}" for a, b, c, d in table]
        lines += [f"earlier rules take every layer that {selector} matches" for selector in self.unused]
        return "\n".join([*lines, self.summary])

    def _counted(self, row: Conversion) -> str:
        return f"{row.parameters:,} {_share(row.parameters, self.parameters):>7}" if row.parameters else ""


def counted(model: nn.Module, rows: list[Conversion]) -> tuple[Conversion, ...]:
    """The rows of layers with the sizes of their weights, and rows for the parameters that are in none of them."""
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
        starts = tuple(start for name in weights for start in (f"{name}_", f"parametrizations.{name}."))  # its parts
        made = [name for name in sizes if name in weights or name.startswith(starts)]
        quantized = sum(sizes[name] for name in made) if is_quantized else 0
        result.append(replace(row, parameters=sum(sizes.values()), quantized=quantized))
    for name, p in model.named_parameters():
        if id(p) not in seen and p.is_floating_point():
            module = modules[name.rpartition(".")[0]]
            result.append(
                Conversion(name, type(module).__name__, None, "no weight of a layer that is known", p.numel())
            )
    return tuple(result)


def _row_of(parameter: str, names: set[str]) -> str:
    """Which of the modules `names` a parameter is in: the innermost."""
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
