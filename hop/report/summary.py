"""A report in sentences: where the error enters, what adds to it, what is still float, where formats change, what may
differ on other machines."""

import math
from collections import Counter
from collections.abc import Sequence

from hop.report.rows import INPUT, PRODUCT, Row

_MAX_NAMED = 3  # most rows that one sentence names


def summary(rows: Sequence[Row], has_reference: bool, parameter_bytes: int) -> tuple[str, ...]:
    """The sentences of a report, the most important first."""
    sentences = [_errors(rows), *_losses(rows)] if has_reference else [_NO_REFERENCE]
    sentences += [_floats(rows), _changes(rows), _exactness(rows), _costs(rows, parameter_bytes)]
    return tuple(sentence for sentence in sentences if sentence)


_NO_REFERENCE = "There is no reference, so errors are unknown."


def where(row: Row) -> str:
    """A row's name, followed by its submodule."""
    return f"{row.name} ({row.path})" if row.path else row.name


def decibels(sqnr: float) -> str:
    return "exact" if sqnr == math.inf else f"{sqnr:.1f} dB"


def first_error(rows: Sequence[Row]) -> Row | None:
    """The first row that differs from the reference."""
    return next((row for row in rows if row.error is not None and row.error.differing), None)


def losses(rows: Sequence[Row]) -> list[Row]:
    """The rows that add to the error of their inputs, the noisiest first."""
    return sorted((row for row in rows if row.error and row.error.added > 0), key=_added, reverse=True)


def _added(row: Row) -> float:
    return row.error.added if row.error is not None else 0.0


def _errors(rows: Sequence[Row]) -> str:
    compared = [row for row in rows if row.error is not None]
    if not compared:
        return "No value of the model corresponds with one of the reference."
    first = first_error(rows)
    if first is None:
        return f"All {len(compared)} values that correspond with one of the reference are equal to it."
    assert first.error is not None
    sqnr = first.error.sqnr
    at = "" if sqnr is None else f", with an SQNR of {decibels(sqnr)}"
    text = f"The error enters first at {where(first)}, {first.operator}, in {first.formats}{at}."
    outputs = [row for row in compared if row.output is not None]
    parts = [
        f"output {row.output} has {decibels(row.error.sqnr)}" if row.error and row.error.sqnr is not None else ""
        for row in outputs
    ]
    parts = [t for t in parts if t][:_MAX_NAMED]
    return f"{text} At the end {', '.join(parts)}." if parts else text


def _losses(rows: Sequence[Row]) -> list[str]:
    text: list[str] = []
    with_loss = [row for row in losses(rows) if row is not first_error(rows)]
    low, floats = ([row for row in with_loss if row.is_float == flag][:_MAX_NAMED] for flag in (False, True))
    for own, what in (
        (low, "Quantized operators that add the most error"),
        (floats, "Float operators that amplify the error"),
    ):
        outputs = [
            (row, decibels(row.error.before), decibels(row.error.sqnr))
            for row in own
            if row.error is not None and row.error.sqnr is not None
        ]
        parts = [f"{where(row)} from {before} to {after}" for row, before, after in outputs if before != after]
        if parts:
            text.append(f"{what}: {'; '.join(parts)}.")
    return text


def _floats(rows: Sequence[Row]) -> str:
    products = [row for row in rows if row.sort == PRODUCT]
    if not products:
        return "There is no matrix product, convolution or embedding."
    left = [row for row in products if row.is_float]
    if not left:
        return f"{_all(len(products))} in low precision."
    if len(left) == len(products):
        kinds = ", ".join(sorted({row.result.format for row in left}))
        return f"{_all(len(products))} in floats ({kinds})."
    names = ", ".join(where(row) for row in left[:_MAX_NAMED])
    more = f" and {len(left) - _MAX_NAMED} more" if len(left) > _MAX_NAMED else ""
    weight = (
        f", with {size(bytes_left)} of parameters" if (bytes_left := sum(row.parameter_bytes for row in left)) else ""
    )
    count = f"{len(left)} of {len(products)} products, convolutions and embeddings"
    return f"{count} are still float{weight}: {names}{more}."


def _all(count: int) -> str:
    if count == 1:
        return "The one product, convolution or embedding computes"
    return f"All {count} products, convolutions and embeddings compute"


def _changes(rows: Sequence[Row]) -> str:
    pairs = Counter((a.format, b.format) for row in rows for a, b in row.changes)
    inside = sum(row.quantizes_inside for row in rows)
    text = "No value changes its format between nodes."
    if pairs:
        parts = ", ".join(f"{count} × {a} to {b}" for (a, b), count in pairs.most_common(_MAX_NAMED))
        places = "place" if sum(pairs.values()) == 1 else "places"
        text = f"Values change their format in {sum(pairs.values())} {places}: {parts}."
    parts = "One product quantizes floats itself." if inside == 1 else f"{inside} products quantize floats themselves."
    return f"{text} {parts}" if inside else text


def _exactness(rows: Sequence[Row]) -> str:
    nodes = [row for row in rows if row.sort != INPUT]
    found = [row for row in nodes if row.inexact]
    if not found:
        return "Every node gives the same bits on every route and CPU, in any batch."
    first = found[0]
    return (
        f"{len(found)} of {len(nodes)} nodes may give other bits on another route or CPU, or in another batch, first "
        f"{where(first)}, {first.operator}: {first.inexact}."
    )


def _costs(rows: Sequence[Row], parameter_bytes: int) -> str:
    seconds = sum(row.seconds or 0 for row in rows)
    slow = max(rows, key=lambda row: row.seconds or 0, default=None)
    if slow is None or not slow.seconds:
        return f"Parameters take {size(parameter_bytes)}."
    share = 100 * slow.seconds / seconds
    return (
        f"Parameters take {size(parameter_bytes)}; the nodes take {1e3 * seconds:.3g} ms in total when run one by one, "
        f"of which {where(slow)} takes {share:.0f} %."
    )


def size(count: int) -> str:
    """Format a number of bytes."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} bytes"
