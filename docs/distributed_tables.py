"""Tables of docs/distributed.md: what is tested on several processes, what the example measured, bytes in a step."""

import math
from collections.abc import Callable

import hop
from docs.training_tables import results
from hop.numerics.presets import PRESETS
from tests.distributed import test_fsdp as fsdp
from tests.distributed import test_parallel as tensor_parallelism
from tests.support import pages
from tests.support.schemes import CROSSED

# The shapes of a decoder of 70 billion parameters: 80 blocks of width 8192, 8 of 64 heads for keys and values, a gated
# network of width 28672, and 128256 words in and out.
BLOCKS, WIDTH, HEADS, INNER, WORDS = 80, 8192, 1024, 28672, 128256
LINEAR = (*[(WIDTH, WIDTH)] * 2, *[(HEADS, WIDTH)] * 2, *[(INNER, WIDTH)] * 2, (WIDTH, INNER))
FORMATS = ("INT8_ROW", "MXFP8", "INT4_32", "MXFP4", "NVFP4")
GPUS = (8, 512)
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
    """Bytes under FSDP2 over all GPUs, and with tensor parallelism inside of a machine."""
    header = ["weights travel as", "bits per weight", *(f"{n} GPUs" for n in GPUS)]
    header += [f"{GPUS[-1]} GPUs, tensor parallel in each {MACHINE}", "of bfloat16's"]
    rows = []
    for name in (None, *FORMATS):
        volumes = [*(sharded_volume(name, n) for n in GPUS), sharded_volume(name, GPUS[-1] // MACHINE, MACHINE)]
        linear = BLOCKS * sum(map(math.prod, LINEAR))
        bits = 16.0 if name is None else 8 * BLOCKS * sum(_bytes(name, s) for s in LINEAR) / linear
        share = volumes[0] / sharded_volume(None, GPUS[0])
        cells = [f"{bits:.4g}", *(f"{v / 1e9:.4g} GB" for v in volumes), f"{share:.2f}"]
        rows.append(["bfloat16" if name is None else f"`{name}`", *cells])
    return pages.table([header, *rows])


# ---- what is tested


EXAMPLE = (1024, 1024)  # the weight whose bytes are shown


def schemes() -> str:
    """Each scheme against one process, and the bytes that FSDP2 gathers of a weight."""
    header = ["scheme", "tensor parallel", "FSDP2", "bytes gathered, of float32's"]
    rows = []
    for name, scheme in CROSSED.items():
        parallel = "same bits" if name in tensor_parallelism.BITS else "float sums in another order"
        sharded = "same bits" if name in fsdp.SCHEMES else "not tested"
        layer = hop.nn.Linear(*EXAMPLE, bias=False, scheme=scheme)
        hop.nn.gather_as_codes(layer)
        rows.append([f"`{name}`", parallel, sharded, _part(hop.nn.bytes_gathered(layer, 2))])
    return pages.table([header, *rows])


def _part(count: int) -> str:
    return f"{count / (4 * math.prod(EXAMPLE)):.4f}"


def two_processes() -> str:
    """The differences of two processes from one, and the bytes of a step, for each run of the example."""
    header = ["run", "first logits", "losses", "parameters", "held-out loss, one process", "two", "MB gathered"]
    rows = []
    for task, found in results("distributed")["tasks"].items():
        for name, r in found.items():
            differ = [f"{r[f'{key}_differ']:.1e}" for key in ("first_logits", "losses", "parameters")]
            losses = [f"{r[key]['loss']:.4f}" for key in ("alone", "together")]
            part = r["gathered_bytes"] / found["float32"]["gathered_bytes"]
            gathered = f"{r['gathered_bytes'] / 1e6:.4g} ({part:.2f})"
            label = f"{task}, `{name}`" if name.isupper() else f"{task}, {name}"
            differ[0] = "0" if r["first_logits_differ"] == 0 else differ[0]
            rows.append([label, *differ, *losses, gathered])
    return pages.table([header, *rows])


TABLES: dict[str, Callable[[], str]] = {
    ": schemes": schemes,
    ": fully sharded": fully_sharded,
    ": two processes": two_processes,
}
