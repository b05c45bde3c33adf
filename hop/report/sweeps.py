"""sweep: measure a model's accuracy, size and time in several schemes."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from hop.compat.pytree import tree_leaves
from hop.dispatch.hop import Hop
from hop.export.analysis.arguments import Arguments, Data, placed
from hop.export.rewrite.scheme import to_scheme
from hop.numerics import schemes
from hop.numerics.schemes import Scheme
from hop.report.comparing import check_count, check_function, exported, inputs_of
from hop.report.journal import Journal, fingerprint
from hop.report.listing import parameter_bytes
from hop.report.measuring import Meter, Progress
from hop.report.sweep_result import Candidate, Sweep
from hop.report.values import float_values

CANDIDATES: Mapping[str, Scheme] = {
    name: schemes.named(name)
    for name in (
        *("int8", "int8_weight", "8da4w", "int4", "fp8", "fp8_weight"),
        *("mxfp8", "mxfp4", "mxfp4_weight", "nvfp4", "nvfp4_weight"),
    )
}
"""The default candidates of `sweep`: schemes of activations and weights, or of weights only, by name."""

FLOAT = "float"  # the name of the unchanged model
Loss = Callable[[list[Any]], float]


@dataclass(frozen=True)
class Options:
    """Further options of a sweep.

    Args:
        rounds: number of timed runs of each candidate, in turns with the float model.
        name: the model's name in the results.
        progress: called with the current activity, the number of candidates done and the number of candidates.
    """

    rounds: int = 5
    name: str = ""
    progress: Progress | None = None

    def __post_init__(self) -> None:
        check_count("sweep: rounds", self.rounds, 5)
        check_function("sweep: progress", self.progress)

    def tell(self, what: str, done: int, of: int) -> None:
        if self.progress is not None:
            self.progress(what, done, of)


def sweep(
    model: ExportedProgram | nn.Module,
    data: Data | None = None,
    candidates: Mapping[str, Scheme] | None = None,
    *,
    loss: Loss | None = None,
    journal: str | Path | None = None,
    options: "Options | None" = None,
) -> Sweep:
    """Convert a float model to several schemes and measure the outputs, size and time of each.

    The model's products are converted by hop.export.to_scheme.

    Args:
        model: an exported program, or a module, which is exported with `data`.
        data: a tuple of positional arguments, a dict of arguments by name, or a list of such tuples or dicts. Default:
            the example inputs that a program was exported with.
        candidates: schemes by name. Default: CANDIDATES.
        loss: a function from the list of outputs, one per argument set, to a number; lower is better. It replaces the
            SQNR of the outputs as the measure of quality.
        journal: a file of JSON lines that each finished candidate is appended to. A sweep of the same model and data
            resumes from it.
        options: see Options.

    Returns:
        A Sweep.

    Raises:
        TypeError: `model` is neither a program nor a module, `data` is not a tuple, a dict or a list of these, or a
            candidate is not a Scheme.
        ValueError: there are no inputs, the journal belongs to another model or other data, or the model already
            computes in low precision.
    """
    chosen, given = Options() if options is None else options, inputs_of("sweep", data, {"model": model})
    if not isinstance(chosen, Options):
        raise TypeError(
            f"sweep: options must be hop.report.Options, got {chosen!r}; give one such as hop.report.Options(rounds=5)"
        )
    check_function("sweep: loss", loss)
    program = exported("sweep", model, given)
    if not isinstance(program, ExportedProgram):
        raise TypeError(
            f"sweep: model must be a torch.export.ExportedProgram or a torch.nn.Module that is not a graph; got "
            f"{type(program).__name__}"
        )
    low = sorted({node.target.name() for node in program.graph.nodes if isinstance(node.target, Hop)})
    if low:
        raise ValueError(
            f"sweep: model must be a float model, but this one calls {', '.join(low)}; pass the model from before "
            "quantization"
        )
    wanted = _checked_candidates(candidates)
    given = [placed(program, x, "sweep", "model") for x in given]
    of = fingerprint(program, given, [chosen.rounds, loss is not None])
    with Journal(journal, of) as notes, torch.no_grad():
        known = {(row["name"], row["scheme"]): Candidate(**row) for row in notes.lines}
        rows = _run(program, wanted, _Trial(program, given, loss, chosen), known, notes)
    return Sweep(tuple(rows), len(given), chosen.name)


def _checked_candidates(candidates: object) -> Mapping[str, Scheme]:
    """Check the candidates and return them. Raises TypeError if one is not a Scheme."""
    wanted = CANDIDATES if candidates is None else candidates
    if not isinstance(wanted, Mapping):
        raise TypeError(
            f"sweep: candidates must be a dict of schemes by name, got {wanted!r}; give one such as "
            "hop.report.CANDIDATES"
        )
    for name, scheme in wanted.items():
        if not isinstance(scheme, Scheme):
            raise TypeError(
                f"sweep: candidates[{name!r}] must be a hop.Scheme, got {scheme!r}; give one such as "
                "hop.schemes.INT8_DYNAMIC"
            )
    return wanted


def _run(
    program: ExportedProgram,
    wanted: Mapping[str, Scheme],
    trial: "_Trial",
    known: Mapping[tuple[str, str], Candidate],
    notes: Journal,
) -> list[Candidate]:
    rows: list[Candidate] = []
    everything: list[tuple[str, Scheme | None]] = [(FLOAT, None), *wanted.items()]
    for done, (name, scheme) in enumerate(everything):
        trial.options.tell(name, done, len(everything))
        key = (name, "" if scheme is None else str(scheme))
        row = known.get(key)
        if row is None:
            converted = None if scheme is None else to_scheme(program, scheme)
            row = replace(trial.measured(None if converted is None else converted.program), name=name, scheme=key[1])
            if converted is not None:
                row = replace(row, rewritten=len(converted.report.rewritten), left=len(converted.report.left))
            notes.add(asdict(row))
        rows.append(row)
    trial.options.tell("done", len(everything), len(everything))
    return rows


class _Trial:
    """Measures programs against the float model on the same arguments."""

    def __init__(self, program: ExportedProgram, data: list[Arguments], loss: Loss | None, options: Options) -> None:
        self.program, self.data, self.loss, self.options = program, data, loss, options
        self.float: Any = program.module()
        self.wanted = [self.float(*x.args, **x.kwargs) for x in data]

    def measured(self, program: ExportedProgram | None) -> Candidate:
        """Measure a program; None measures the float model."""
        module = self.float if program is None else program.module()
        outputs = self.wanted if program is None else [module(*x.args, **x.kwargs) for x in self.data]
        losses: list[float] = []
        floats: list[float] = []
        for _ in range(self.options.rounds):  # in turns, so that other load on the machine slows both
            floats.append(_seconds(self.float, self.data[0]))
            losses.append(floats[-1] if program is None else _seconds(module, self.data[0]))
        return Candidate(
            name=FLOAT,
            scheme="",
            sqnr=_sqnr(outputs, self.wanted),
            cosine=_cosine(outputs, self.wanted),
            loss=None if self.loss is None else float(self.loss(outputs)),
            parameter_bytes=parameter_bytes(Meter(program or self.program, "model", "sweep")),
            seconds=statistics.median(losses),
            float_seconds=statistics.median(floats),
            rewritten=0,
            left=0,
        )


def _seconds(run: Callable[..., object], arguments: Arguments) -> float:
    start = time.perf_counter()
    outputs = tree_leaves(run(*arguments.args, **arguments.kwargs))
    for x in outputs:
        if isinstance(x, Tensor) and x.is_cuda:
            torch.cuda.synchronize(x.device)
    return time.perf_counter() - start


def _pairs(outputs: object, wanted: object) -> list[tuple[Tensor, Tensor]]:
    """The float outputs, each with the float model's."""
    both = zip(tree_leaves(outputs), tree_leaves(wanted), strict=True)
    values = [(float_values(x), float_values(y)) for x, y in both]
    return [(x.double(), y.double()) for x, y in values if x is not None and y is not None]


def _sqnr(outputs: object, wanted: object) -> float:
    pairs = _pairs(outputs, wanted)
    signal = sum(y.square().sum().item() for _, y in pairs)
    noise = sum((x - y).square().sum().item() for x, y in pairs)
    if math.isnan(noise) or signal == 0:
        return math.inf if noise == 0 else -math.inf
    return math.inf if noise == 0 else 10 * math.log10(signal / noise) if noise < math.inf else -math.inf


def _cosine(outputs: object, wanted: object) -> float:
    """The mean cosine similarity over all rows, zero rows excluded."""
    cosines: list[Tensor] = []
    for x, y in _pairs(outputs, wanted):
        x, y = (v.reshape(-1, v.shape[-1]) if v.dim() else v.reshape(1, 1) for v in (x, y))
        lengths = x.square().sum(1).sqrt() * y.square().sum(1).sqrt()
        cosines.append(((x * y).sum(1) / lengths)[lengths > 0])
    rows = torch.cat(cosines) if cosines else torch.zeros(0)
    return rows.mean().item() if rows.numel() else math.nan
