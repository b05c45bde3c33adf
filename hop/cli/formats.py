"""hop formats: list the number formats, or the codes and values of one."""

import itertools
from typing import Annotated

import torch
import typer

import hop
from hop.cli.output import show, show_json
from hop.export.table import table
from hop.numerics.spelling import JsonObject

_KINDS = {
    hop.formats.Integer: "integer",
    hop.formats.Float: "float",
    hop.formats.Codebook: "codebook",
    hop.formats.PowerOfTwo: "power of two",
}


def _names(incomplete: str) -> list[str]:
    return [f.name for f in hop.formats.FORMATS if f.name.startswith(incomplete)]


def formats(
    name: Annotated[
        str | None,
        typer.Argument(help="Show the codes of this format.", show_default="list all", autocompletion=_names),
    ] = None,
    presets: Annotated[bool, typer.Option("--presets", help="List the quantizers of hop.presets.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the number formats, or show one format's codes, with their bits and values. Or list the presets: a format,
    the block of elements that share a scale, and the rule for the scale.

    The values are those of the codes before scaling. In JSON, infinities and NaN are the strings "inf", "-inf" and
    "nan".

    Examples:
        hop formats
        hop formats e2m1          its sixteen codes
        hop formats --presets
        hop formats int8 --json
    """
    if presets:
        if name is not None:
            raise typer.BadParameter(
                f"lists all presets; it does not combine with the format name {name!r}", param_hint="'--presets'"
            )
        quantizers = [_preset(preset, q) for preset, q in hop.presets.PRESETS.items()]
        if as_json:
            show_json(quantizers)
        else:
            show(
                table(("name", "format", "block", "scale"), [[str(v) for v in q.values()] for q in quantizers], right=4)
            )
        return
    if name is None:
        rows = [facts(f) for f in hop.formats.FORMATS]
        if as_json:
            show_json(rows)
        else:
            show(_listing(rows))
        return
    chosen = next((f for f in hop.formats.FORMATS if f.name == name.lower()), None)
    if chosen is None:
        known = ", ".join(f.name for f in hop.formats.FORMATS)
        rule = "is not a format; use one of"
        if name.upper() in hop.presets.PRESETS:
            rule = "is a preset, see hop formats --presets, not a format; use one of"
        raise typer.BadParameter(f"{name!r} {rule} {known}", param_hint="NAME")
    if as_json:
        show_json({**facts(chosen), "codes": [{"code": c, "number": n} for c, n in codes(chosen)]})
        return
    show(_heading(chosen), style="bold")
    for code, number in codes(chosen):
        show(f"0x{code:02x}  {_bits(chosen, code)}  {number:.9g}")


def facts(fmt: hop.formats.Format) -> JsonObject:
    """The properties of a format that the list shows."""
    return {
        "name": fmt.name,
        "kind": _KINDS[type(fmt)],
        "bits": fmt.bits,
        "dtype": str(fmt.dtype).removeprefix("torch."),
        "numbers": len(fmt.numbers),
        "smallest": fmt.min,
        "largest": fmt.max,
        "least_above_zero": min(n for n in fmt.numbers if n > 0),
    }


def _preset(name: str, q: hop.Quantizer) -> JsonObject:
    return {"name": name, "format": q.format.name, "block": list(q.block), "scale": str(q.scale).partition(":")[2]}


def codes(fmt: hop.formats.Format) -> list[tuple[int, float]]:
    """Each code as an unsigned integer, with its value, including NaN and infinities. Unused codes are left out."""
    bits = torch.arange(len(fmt.numbers) if fmt.is_codebook else 2**fmt.bits)
    if fmt.dtype.is_floating_point:
        stored = bits.to(torch.uint8).view(fmt.dtype)
    else:
        stored = torch.where(bits >= 2 ** (fmt.bits - 1), bits - 2**fmt.bits, bits) if fmt.dtype.is_signed else bits
        stored = stored.to(fmt.dtype)
    values = fmt.decode(stored).tolist()
    known = set(fmt.numbers)
    return [(c, n) for c, n in zip(bits.tolist(), values, strict=True) if n in known or not fmt.is_integer]


def _listing(listed: list[JsonObject]) -> str:
    names = ("name", "kind", "dtype", "bits", "numbers", "smallest", "largest", "least above 0")
    rows = [
        [
            *(f["name"], f["kind"], f["dtype"], str(f["bits"]), str(f["numbers"])),
            *(f"{f[key]:.6g}" for key in ("smallest", "largest", "least_above_zero")),
        ]
        for f in listed
    ]
    return table(names, rows, right=3)


def _heading(fmt: hop.formats.Format) -> str:
    f = facts(fmt)
    return (
        f"{f['name']}: {f['kind']} of {f['bits']} bits in {f['dtype']}, {f['numbers']} numbers "
        f"from {f['smallest']:.9g} to {f['largest']:.9g}"
    )


def _bits(fmt: hop.formats.Format, code: int) -> str:
    """The bits of a code; for floats, sign, exponent and mantissa are separated."""
    text = f"{code:0{fmt.bits}b}"
    boundaries = itertools.accumulate(fmt.parts, initial=0)
    return " ".join(text[a:b] for a, b in itertools.pairwise(boundaries) if a < b)
