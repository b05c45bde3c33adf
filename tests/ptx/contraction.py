"""Find the floating-point instructions that a compiler may fuse."""

from tests.ptx.syntax import parse

ROUNDINGS = {"rn", "rz", "rm", "rp"}
FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"}


def contractable(ptx: str) -> list[str]:
    """The sums and products without a rounding, which ptxas may contract to fma; with their lines."""
    return [
        f"line {i.line}: {i.text}"
        for entry in parse(ptx).values()
        for i in entry.instructions
        if i.parts[0] in ("add", "sub", "mul") and i.type in FLOATS and not ROUNDINGS & set(i.parts)
    ]
