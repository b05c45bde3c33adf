"""Tables of docs/distributed.md: what the tests run on several processes, what the example measured, and the bytes that
are exchanged in a step."""

import math
from collections.abc import Callable

import hop
from docs.training_tables import results
from hop.numerics.presets import PRESETS
from tests.checkpoint import test_checkpoint as checkpoints
from tests.distributed import test_fsdp as fsdp
from tests.distributed import test_parallel as tensor_parallelism
from tests.distributed import test_tensor as tensors
from tests.support import pages
from tests.support.schemes import CROSSED

# The shapes of a decoder of 70 billion parameters: 80 blocks of width 8192, 8 of 64 heads for keys and values, a gated
# network of width 28672, and 128256 words in and out.
BLOCKS, WIDTH, HEADS, INNER, WORDS = 80, 8192, 1024, 28672, 128256
LINEAR = (*[(WIDTH, WIDTH)] * 2, *[(HEADS, WIDTH)] * 2, *[(INNER, WIDTH)] * 2, (WIDTH, INNER))
FORMATS = ("INT8_ROW", "FP8_ROW", "FP8_128X128", "MXFP8", "INT4_32", "MXFP4", "NVFP4")
GPUS = (8, 64, 512)
MACHINE = 8  # GPUs of one machine, for tensor parallelism
GRADIENT = 2  # bytes: gradients are summed in bfloat16


def weight_bytes(preset: str | None) -> int:
    """The bytes of all weights: those of linear layers quantized, the rest in bfloat16."""
    rest = 2 * WORDS * WIDTH * 2
    if preset is None:
        return rest + BLOCKS * sum(math.prod(shape) for shape in LINEAR) * 2
    return rest + BLOCKS * sum(_bytes(preset, shape) for shape in LINEAR)


def parameters() -> int:
    return weight_bytes(None) // 2


def _bytes(preset: str, shape: tuple[int, int]) -> int:
    proto = hop.TensorProto(shape, quantizer=PRESETS[preset])
    return sum(math.prod(b.shape) * b.dtype.itemsize for b in proto.buffers())


def sharded_volume(preset: str | None, processes: int, parts: int = 1) -> float:
    """Bytes that each process receives in a step: weights gathered in the forward and again in the backward, gradients
    summed. Where tensor parallelism has cut each weight into `parts`, of one of them."""
    share = (processes - 1) / processes / parts
    return share * (2 * weight_bytes(preset) + GRADIENT * parameters())


def fully_sharded() -> str:
    """FSDP2 over all GPUs, without and with tensor parallelism inside of a machine."""
    header = ["weights travel as", "bits per weight", *(f"{n} GPUs" for n in GPUS)]
    header += [f"{n} GPUs, tensor parallel in each {MACHINE}" for n in GPUS if n > MACHINE]
    base = (
        [sharded_volume(None, n) for n in GPUS],
        [sharded_volume(None, n // MACHINE, MACHINE) for n in GPUS if n > MACHINE],
    )
    rows = []
    for name in (None, *FORMATS):
        found = [sharded_volume(name, n) for n in GPUS] + [
            sharded_volume(name, n // MACHINE, MACHINE) for n in GPUS if n > MACHINE
        ]
        cells = [f"{v / 1e9:.4g} GB ({v / b:.2f})" for v, b in zip(found, [*base[0], *base[1]], strict=True)]
        linear = BLOCKS * sum(map(math.prod, LINEAR))
        bits = 16.0 if name is None else 8 * BLOCKS * sum(_bytes(name, s) for s in LINEAR) / linear
        rows.append(["bfloat16" if name is None else f"`{name}`", f"{bits:.4g}", *cells])
    return pages.table([header, *rows])


def tensor_parallel() -> str:
    """The sums of row-parallel layers, for each token, in the forward of all blocks."""
    share = 2 * (MACHINE - 1) / MACHINE  # a ring passes each part on, to sum it and to spread the sum
    rows = [["sums of", "bytes per element", f"KB per token, {MACHINE} GPUs"]]
    for what, size in (("bfloat16 results", 2), ("int32 or float32 products", 4)):
        rows.append([what, str(size), f"{share * 2 * BLOCKS * WIDTH * size / 1e3:.4g}"])
    return pages.table(rows)


# ---- what the tests run


EXAMPLE = (1024, 1024)  # the weight whose bytes are shown
YES = "✓"


def formats() -> str:
    """Each named quantizer on each engine, and the bytes of its buffers, which are those that the tests see travel."""
    header = ["quantizer", "collectives", "DTensor", "FSDP2, a parameter", "checkpoints", "bytes of float32's"]
    rows = []
    for name, q in PRESETS.items():
        engines = (
            q in tensors.FORMATS,
            q in tensors.FORMATS,
            name in fsdp.QUANTIZED,
            name in checkpoints.NAMES,
        )
        rows.append([f"`{name}`", *(YES if e else "" for e in engines), f"{_part(_bytes(name, EXAMPLE))}"])
    return pages.table([header, *rows])


def schemes() -> str:
    """Each named scheme of a linear layer, against one process, and the bytes that FSDP2 gathers of its weight."""
    header = ["scheme", "tensor parallel", "FSDP2, weights as codes", "bytes gathered, of float32's"]
    rows = []
    for name, scheme in CROSSED.items():
        parallel = "bit for bit" if name in tensor_parallelism.BITS else "but for the order of float sums"
        sharded = "bit for bit" if name in fsdp.SCHEMES else ""
        layer = hop.nn.Linear(*EXAMPLE, bias=False, scheme=scheme)
        hop.nn.gather_as_codes(layer)
        rows.append([f"`{name}`", parallel, sharded, _part(hop.nn.bytes_gathered(layer, 2))])
    return pages.table([header, *rows])


def _part(count: int) -> str:
    return f"{count / (4 * math.prod(EXAMPLE)):.4f}"


def two_processes() -> str:
    """What the example found in each scheme: differences from one process, and bytes of a step."""
    header = [
        "",
        "first logits",
        "losses",
        "parameters",
        "held-out loss, one process",
        "two",
        "MB gathered",
        "gradients",
    ]
    rows = []
    for task, found in results("distributed")["tasks"].items():
        for name, r in found.items():
            differ = [f"{r[f'{key}_differ']:.1e}" for key in ("first_logits", "losses", "parameters")]
            losses = [f"{r[key]['loss']:.4f}" for key in ("alone", "together")]
            part = r["gathered_bytes"] / found["float32"]["gathered_bytes"]
            gathered = f"{r['gathered_bytes'] / 1e6:.4g} ({part:.2f})"
            label = f"{task}, `{name}`" if name.isupper() else f"{task}, {name}"
            differ[0] = "0" if r["first_logits_differ"] == 0 else differ[0]
            rows.append([label, *differ, *losses, gathered, f"{r['reduced_bytes'] / 1e6:.4g}"])
    return pages.table([header, *rows])


TABLES: dict[str, Callable[[], str]] = {
    ": formats": formats,
    ": schemes": schemes,
    ": fully sharded": fully_sharded,
    ": tensor parallel": tensor_parallel,
    ": two processes": two_processes,
}
