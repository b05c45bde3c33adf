"""The diagrams of README.md and docs/concepts.md: three paths, the layers, a call. Written by python -m docs.make."""

from collections.abc import Sequence
from html import escape

INK, SOFT, PAPER = "#1f2430", "#5b6270", "#ffffff"
# Colours of Okabe and Ito, which differ for all eyes, thinned for the boxes.
BLUE, GREEN = ("#0072b2", "#dcecf7"), ("#009e73", "#daf1ea")
AMBER, GREY = ("#b8860b", "#fbf0d9"), ("#5b6270", "#eef0f3")
Colour = tuple[str, str]


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    arrow = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{SOFT}"/></marker></defs>'
    )
    style = f'role="img" font-family="system-ui, sans-serif" fill="{INK}"'
    paper = f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
    return "\n".join([f"{head} {style}>", f"<title>{escape(title)}</title>", arrow, paper, *parts, "</svg>"]) + "\n"


def box(x: int, y: int, width: int, height: int, colour: Colour, title: str, *lines: str) -> str:
    """A box with a title and lines of text beneath it."""
    edge, fill = colour
    place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    parts = [f'<rect {place} rx="8" fill="{fill}" stroke="{edge}" stroke-width="1.5"/>']
    middle = x + width // 2
    top = y + (height - 18 * len(lines)) // 2 + 5
    parts.append(text(middle, top, title, size=15, weight=600))
    parts += [text(middle, top + 19 + 18 * i, line, size=12.5, colour=SOFT) for i, line in enumerate(lines)]
    return "".join(parts)


def text(
    x: int, y: int, words: str, *, size: float = 12.5, weight: int = 400, colour: str = INK, anchor: str = "middle"
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


def arrow(*points: tuple[int, int]) -> str:
    line = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{line}" fill="none" stroke="{SOFT}" stroke-width="1.5" marker-end="url(#tip)"/>'


def paths() -> str:
    """The three paths to one set of integers, and where these run."""
    return svg(
        460,
        420,
        "Represent, lower and train lead to one program on codes, which computes the same codes in every runtime",
        [
            box(10, 10, 440, 56, BLUE, "represent", "codes and scales of your tool: hop.from_codes, hop.scaled"),
            box(10, 76, 440, 56, BLUE, "lower", "a PT2E or torchao graph: hop.export.to_integer"),
            box(10, 142, 440, 56, BLUE, "train", "a float model: hop.nn.convert, hop.quantize_"),
            arrow((230, 198), (230, 226)),
            box(
                10,
                228,
                440,
                66,
                AMBER,
                "one program on codes",
                "ATen operators on codes of 8 and 4 bits;",
                "integer sums are exact",
            ),
            arrow((230, 294), (230, 322)),
            box(
                *(10, 324, 440, 86),
                GREEN,
                "the same integers, bit for bit",
                "eager · torch.compile · torch.export · core ATen",
                "AOTInductor · ONNX · ExecuTorch · LiteRT · TOSA",
            ),
        ],
    )


def layers() -> str:
    """The packages, each above those that it imports."""
    return svg(
        900,
        428,
        "Users of the operators, the operators, and the packages that they import",
        [
            box(30, 20, 840, 56, GREY, "command line, reports", "python -m hop"),
            box(30, 96, 200, 76, BLUE, "hop.nn", "layers with a scheme:", "convert, calibrate, freeze"),
            box(243, 96, 200, 76, BLUE, "hop.optim", "states of 8 and 4 bits"),
            box(456, 96, 200, 76, BLUE, "hop.export", "integers, ONNX, ExecuTorch,", "compare, bound"),
            box(669, 96, 201, 76, BLUE, "files, processes", "hop.storage, hop.checkpoint,", "hop.distributed"),
            box(30, 192, 840, 66, AMBER, "operators: hop/impls/", "out_dtype · scaled · quantized · quantize"),
            box(
                30,
                278,
                270,
                130,
                GREEN,
                "values",
                "format → scale rule → quantizer",
                "→ scheme, quantized tensor",
                "",
                "numerics/, tensor/",
            ),
            box(
                315,
                278,
                270,
                130,
                GREEN,
                "machinery",
                "gradients, vmap, compile, export:",
                "each dispatch key once",
                "",
                "dispatch/, compat/",
            ),
            box(
                600,
                278,
                270,
                130,
                GREEN,
                "kernels",
                "C++ for CPUs, CuTe for GPUs;",
                "each may decline, and says why",
                "",
                "native/, cutlass_kernels/",
            ),
        ],
    )


def call() -> str:
    """From a call of an operator to its result."""
    return svg(
        900,
        420,
        "How a call runs: straight to a kernel, or through PyTorch's dispatch to a graph or to the reference",
        [
            box(20, 40, 170, 70, AMBER, "a call", "hop.scaled(op, out, …)"),
            arrow((190, 75), (238, 75)),
            box(240, 40, 200, 70, GREY, "gradient, transform, tracer?", "four thread-local checks"),
            arrow((440, 75), (488, 75)),
            text(464, 66, "no"),
            box(490, 40, 180, 70, GREEN, "the list of kernels", "the first that does", "not decline"),
            arrow((670, 75), (718, 75)),
            box(720, 40, 160, 70, AMBER, "the result", "about 1 µs on top"),
            arrow((340, 110), (340, 178)),
            text(360, 148, "yes", anchor="start"),
            box(240, 180, 200, 76, BLUE, "dispatch", "gradients, vmap, fakes,", "DTensor, tracing"),
            arrow((440, 218), (538, 218), (538, 112)),
            text(448, 208, "eager", anchor="start"),
            arrow((340, 256), (340, 318)),
            text(328, 292, "a program is recorded", anchor="end"),
            box(240, 320, 200, 70, BLUE, "one node in a graph", "torch.compile, torch.export"),
            arrow((440, 355), (488, 355)),
            box(490, 320, 180, 70, GREEN, "the reference", "in core ATen"),
            arrow((670, 355), (718, 355)),
            box(720, 320, 160, 70, AMBER, "other runtimes", "Inductor, ONNX,", "ExecuTorch"),
            arrow((400, 320), (400, 288), (620, 288), (620, 112)),
            text(630, 210, "compiled: the kernels again", anchor="start"),
        ],
    )


DIAGRAMS = {"paths.svg": paths, "layers.svg": layers, "call.svg": call}
