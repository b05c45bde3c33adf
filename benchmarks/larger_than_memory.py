"""Run `hop quantize` on a checkpoint larger than its memory limit: seconds, and peak memory.

    python -m benchmarks.larger_than_memory [--folder FOLDER] [--size 6] [--limit 2] [--scheme int4 ...] [--output FILE]

A Llama with random bfloat16 weights, `size` GB in shards of 1.5 GB, is written to a new folder in FOLDER (default: the
temporary folder), quantized with each scheme in a separate process, and removed. The limit, in GB, is RLIMIT_DATA:
private writable memory, including allocated but untouched pages, excluding files mapped read-only. `peak` is the
maximum resident set, which includes such files; `importing` is its value before anything is read. One tensor of each
shard is then compared with hop.quantize.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import hop
from examples.common import json_rows
from hop.interchange.safetensors_files import Entry, Header, read_header, writer

ROOT = Path(__file__).parents[1]
HIDDEN, INNER, VOCABULARY, HEADS = 4096, 11008, 32000, 32
SHARD = 15 * 10**8  # bytes
PIECE = 2**24  # elements to generate at a time
# The program of a limited process. Arguments: bytes, the file for its peak, the arguments of hop. It measures its own
# peak, because the one from wait4 includes the parent's memory before exec.
LIMITED = """
import atexit, re, resource, runpy, sys
limit, place = int(sys.argv.pop(1)), sys.argv.pop(1)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
said = lambda: re.search("VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read()).group(1)
atexit.register(lambda: open(place, "w").write(said()))
if len(sys.argv) == 1:
    import hop.integrations
else:
    runpy.run_module("hop", run_name="__main__")
"""


def config(layers: int) -> Any:
    import transformers

    return transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def layers_of(size: float) -> int:
    """The number of layers of a model with `size` GB."""
    each = 2 * (4 * HIDDEN**2 + 3 * HIDDEN * INNER)
    return max(round((size * 1e9 - 4 * VOCABULARY * HIDDEN) / each), 1)


def write_model(folder: Path, size: float) -> int:
    """Write a checkpoint of random weights with little memory; returns its bytes."""
    import transformers

    own = config(layers_of(size))
    own.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in transformers.LlamaForCausalLM(own).state_dict().items()}
    shards: list[list[Entry]] = [[]]
    for name, shape in shapes.items():
        if sum(e.bytes for e in shards[-1]) > SHARD:
            shards.append([])
        shards[-1].append(Entry(name, torch.bfloat16, tuple(shape), 0, 0))
    places: dict[str, str] = {}
    for i, entries in enumerate(shards, 1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        places |= {e.name: name for e in entries}
        with writer(folder / name, entries, {"format": "pt"}) as file:
            for e in entries:
                count = e.bytes // 2
                for start in range(0, count, PIECE):
                    piece = torch.empty(min(PIECE, count - start), dtype=torch.bfloat16).normal_(0, 0.02)
                    file.write(e.name, 2 * start, piece.view(torch.uint8))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return sum(e.bytes for entries in shards for e in entries)


def limited(limit: float, *arguments: str) -> tuple[float, float, float]:
    """Seconds, processor seconds and peak memory in GB of a process under a limit.

    Raises RuntimeError with its output if it fails.
    """
    with tempfile.NamedTemporaryFile() as peak, tempfile.TemporaryFile() as said:
        command = [sys.executable, "-W", "ignore", "-c", LIMITED, str(int(limit * 1e9)), peak.name, *arguments]
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
        if process.returncode:
            said.seek(0)
            raise RuntimeError(f"hop {' '.join(arguments)}: {said.read().decode()[-3000:]}")
        return seconds, usage.ru_utime + usage.ru_stime, int(peak.read()) * 1024 / 1e9


def check(folder: Path, out: Path) -> int:
    """Compare a tensor of each shard with hop.quantize; returns the number of comparisons."""
    count = 0
    for file in sorted(folder.glob("*.safetensors")):
        floats, codes = read_header(file), read_header(out / file.name)
        name = next(n for n in floats.entries if f"{n}:codes" in codes.entries)
        q = hop.Quantizer.parse(_described(codes)[name]["quantizer"])
        entry = floats.entries[name]
        want: Any = hop.quantize(q, floats.rows(entry, 0, entry.shape[0]))
        for key, data in want.buffers().items():
            held = codes.entries[f"{name}:{key}"]
            got = codes.rows(held, 0, held.shape[0])
            assert torch.equal(got.view(torch.uint8), data.view(torch.uint8)), f"{file.name}: {name}: {key}"
        count += 1
    return count


def _described(header: Header) -> Any:
    import safetensors

    with safetensors.safe_open(str(header.path), "pt") as file:
        return json.loads(file.metadata()["hop"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--size", type=float, default=6.0)
    parser.add_argument("--limit", type=float, default=2.0)
    parser.add_argument("--scheme", nargs="+", default=["int4", "nvfp4"])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        free = shutil.disk_usage(place).free
        if free < 1.7e9 * options.size:
            parser.error(f"--folder: {place} has {free / 1e9:.1f} GB left, and {1.7 * options.size:.1f} are needed")
        folder, out = Path(place) / "floats", Path(place) / "codes"
        size = write_model(folder, options.size)
        *_, importing = limited(options.limit)
        print(f"{size / 1e9:.2f} GB under a limit of {options.limit:g} GB; importing {importing:.2f} GB", flush=True)
        for scheme in options.scheme:
            seconds, processor, peak = limited(options.limit, "quantize", str(folder), str(out), "--scheme", scheme)
            written, compared = sum(p.stat().st_size for p in out.glob("*.safetensors")), check(folder, out)
            rows.append(
                {"scheme": scheme, "seconds": seconds, "processor": processor, "peak": peak, "written": written}
            )
            times = f"{seconds:.0f} s ({processor:.0f} of the processor)"
            sizes = f"peak {peak:.2f} GB, {written / 1e9:.2f} GB written"
            print(f"{scheme}: {times}, {sizes}, {compared} tensors compared", flush=True)
            shutil.rmtree(out)
    if options.output:
        found = {"size": size, "limit": options.limit, "importing": importing, "rows": rows}
        options.output.write_text(json_rows(found) + "\n")


if __name__ == "__main__":
    main()
