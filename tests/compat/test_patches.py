"""Each record of hop.compat.patches tells which versions of torch have the fault: its program shows it there alone."""

import os
import platform
import signal
import textwrap
import unittest
from pathlib import Path

import pytest
from parameterized import parameterized

from hop.compat.patches import PATCHES
from hop.compat.versions import TESTED
from tests.support import forks

# By the name of a record: the body of a function that returns whether the fault shows, or raises where that is how.
FAULTS = {
    "strided_beginnings": """
        f = lambda x: x[2:].as_strided((4, 4), (4, 1)) + 1
        x = torch.arange(24).reshape(6, 4)
        return not torch.equal(torch.compile(f)(x), f(x))
    """,
    "unsigned_products": """
        torch._int_mm(torch.ones(32, 32, dtype=torch.uint8), torch.ones(32, 32, dtype=torch.int8))
    """,
    "bits_before_rounding": """
        f = lambda x: (x * 1.7 + x).view(torch.int16)
        x = torch.randn(4096).bfloat16()
        return not torch.equal(torch.compile(f)(x), f(x))
    """,
    "loops_that_do_not_divide": """
        f = lambda x, s: x * s.unsqueeze(-1).expand(4, 32).reshape(128)[:100]
        x, s = torch.randn(100), torch.randn(4)
        return not torch.equal(torch.compile(f)(x, s), f(x, s))
    """,
    "loads_of_part_vectors": """
        from torch._inductor.utils import run_and_get_code
        torch._inductor.config.cpp.simdlen = 256
        x = torch.randint(-128, 128, (1024,), dtype=torch.int8)
        out, codes = run_and_get_code(torch.compile(lambda x: x.to(torch.int32) * 3), x)
        assert torch.equal(out, x.int() * 3)
        return "::loadu(in_ptr0" in codes[0]
    """,
    "opaque_values": """
        f = lambda x, q: x * hop.presets.INT8_ROW.format.max + (q == hop.presets.INT8_ROW)
        torch.compile(f, backend="eager", fullgraph=True)(torch.ones(2), hop.presets.INT8_ROW)
    """,
    "batched_views": """
        torch.func.vmap(lambda x: x.view(torch.int32) + 1)(torch.zeros(2, 3))
    """,
    "attributes_of_value_classes": """
        f = lambda x: x + hasattr(hop.Quantizer, "absent")
        torch.compile(f, backend="eager", fullgraph=True)(torch.ones(2))
    """,
    "fake_results": """
        f = lambda x: hop.out_dtype(torch.ops.aten.mm.default, torch.int32, x, x)
        torch.compile(f, backend="eager", fullgraph=True)(torch.ones(2, 2, dtype=torch.int8))
    """,
    "headers_of_float8": """
        class Widen(torch.nn.Module):
            def forward(self, x):
                return x.float() * 2
        program = torch.export.export(Widen(), (torch.ones(4).to(torch.float8_e4m3fn),))
        torch._inductor.aoti_compile_and_package(program, package_path=os.path.join(sys.argv[2], "p.pt2"))
    """,
    "lists_of_one_tensor": """
        torch._inductor.config.cpp_wrapper = True
        norm = torch.ops.aten.rms_norm.default
        f = lambda x: hop.scaled(norm, torch.float32, hop.quantize(hop.presets.INT8_ROW, x), [64], None, 1e-6)
        torch.compile(f)(torch.randn(4, 64))
    """,
    "values_in_signatures": """
        class Reads(torch.nn.Module):
            def forward(self, x, q):
                return hop.fake_quantize(q, x)
        try:
            torch.export.export(Reads(), (torch.ones(4, 64), hop.presets.INT8_ROW))
        except TypeError as e:
            assert "make it an attribute of the module" in str(e), e
            return False
        return True
    """,
    "lowered_subclasses": """
        class Takes(torch.nn.Module):
            def forward(self, x):
                return hop.dequantize(x)
        program = torch.export.export(Takes(), (hop.quantize(hop.presets.INT8_ROW, torch.ones(4, 64)),))
        try:
            program.run_decompositions()
        except TypeError as e:
            assert "hop.from_codes" in str(e), e
            return False
    """,
    "unwrapped_parameters": """
        class Holds(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.w = torch.nn.Parameter(hop.quantize(hop.presets.INT8_ROW, torch.ones(4, 64)))
            def forward(self, x):
                return x @ hop.dequantize(self.w).t()
        model, x = Holds(), torch.ones(2, 64)
        program = torch.export.export(model, (x,)).run_decompositions(hop.decompositions())
        return not torch.equal(program.module()(x), model(x))
    """,
    "hashes_of_local_tensors": """
        mesh = one_process()
        from torch.distributed.tensor import DTensor, Replicate
        q = [hop.quantize(p, torch.ones(4, 128)) for p in (hop.presets.MXFP8, hop.presets.MXFP8_E5M2)]
        a, b = (DTensor.from_local(t, mesh, [Replicate()])._stable_hash_for_caching() for t in q)
        return a == b
    """,
    "hashes_of_subclasses": """
        from torch._dynamo.utils import counters
        from hop.compat import values
        t = hop.quantize(hop.presets.INT8_ROW, torch.ones(4, 128))
        for sources in ("these", "others"):
            values.sources = lambda: sources
            torch._dynamo.reset()
            torch.compile(lambda t: t.detach().clone(), fullgraph=True)(t)
        return counters["aot_autograd"]["autograd_cache_hit"] == 1
    """,
    "tables_of_dtype_rules": """
        from torch._inductor import compile_fx
        from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
        rule = vars(DtypePropagationOpsHandler())["sqrt"]
        return vars(DtypePropagationOpsHandler())["sqrt"] is not rule
    """,
    "keys_of_programs": """
        from torch._dynamo.utils import counters
        from hop.compat import values
        x = torch.ones(4, 64, dtype=torch.int8)
        for sources in ("these", "others"):
            values.sources = lambda: sources
            torch._dynamo.reset()
            torch.compile(lambda x: hop.out_dtype(torch.ops.aten.mm.default, torch.int32, x, x.t()), fullgraph=True)(x)
        return counters["aot_autograd"]["autograd_cache_hit"] == 1
    """,
    "cached_functions": """
        from torch._dynamo.utils import counters
        x = torch.ones(4, 64, dtype=torch.int8)
        torch.compile(lambda x: hop.out_dtype(torch.ops.aten.mm.default, torch.int32, x, x.t()), fullgraph=True)(x)
        return counters["aot_autograd"]["autograd_cache_bypass"] == 1
    """,
    "operands_of_cond": """
        w = hop.quantize(hop.presets.INT8_ROW, torch.ones(64, 64))
        torch.cond(torch.tensor(True), lambda: hop.dequantize(w), lambda: hop.dequantize(w) * 2, ())
    """,
    "operands_of_map_impl": """
        from torch._higher_order_ops.map import map
        w = hop.quantize(hop.presets.INT8_ROW, torch.ones(64, 64))
        map(lambda x: hop.dequantize(w) * x, torch.ones(3))
    """,
    "operands_of_scan": """
        from torch._higher_order_ops.scan import scan
        w = hop.quantize(hop.presets.INT8_ROW, torch.ones(64, 64))
        scan(lambda c, x: (c + hop.dequantize(w) * x, c * 1), torch.ones(64, 64), torch.ones(3))
    """,
    "operands_of_while_loop": """
        from torch._higher_order_ops.while_loop import while_loop
        w = hop.quantize(hop.presets.INT8_ROW, torch.ones(64, 64))
        start = (torch.tensor(0), torch.ones(64, 64))
        while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x + hop.dequantize(w)), start)
    """,
    "operands_of_invoke_subgraph": """
        w = hop.quantize(hop.presets.INT8_ROW, torch.ones(64, 64))
        region = torch.compiler.nested_compile_region(lambda x, w: hop.scaled(torch.ops.aten.mul.Tensor, x.dtype, x, w))
        torch.compile(lambda x, w: region(region(x, w), w), backend="aot_eager", fullgraph=True)(torch.ones(64, 64), w)
    """,
    "storages_of_parts": """
        from torch._higher_order_ops.while_loop import while_loop
        w = hop.quantize(hop.presets.INT8_ROW, torch.ones(64, 64))
        start = (torch.tensor(0), torch.ones(64, 64))
        while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x + hop.dequantize(w)), start)
    """,
    "fakes_of_parts": """
        w = hop.quantize(hop.presets.INT8_ROW, torch.ones(64, 64))
        torch.cond(torch.tensor(True), lambda: hop.dequantize(w), lambda: hop.dequantize(w) * 2, ())
    """,
    "gradients_traced_again": """
        from torch._higher_order_ops.scan import scan
        f = lambda c, x: scan(lambda c, x: (c + hop.fake_quantize(hop.presets.INT8_ROW, x), c * 1), c, x)[0]
        c, x = torch.ones(4, 64, requires_grad=True), torch.ones(3, 4, 64, requires_grad=True)
        torch.compile(f, fullgraph=True)(c, x).sum().backward()
    """,
    "layers_of_traces": """
        torch.fx.symbolic_trace(torch.nn.Sequential(hop.nn.Linear(64, 64, scheme=hop.schemes.INT8_DYNAMIC)))
    """,
    "moves_between_placements": """
        mesh = one_process()
        from hop.compat.patches import MOVING
        from torch.distributed.tensor import Shard, distribute_tensor
        told = []
        MOVING.append(lambda: told.append(1) or contextlib.nullcontext())
        distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        return not told
    """,
}

# Those that end the process.
CRASHES = {"lists_of_one_tensor"}
# No short program shows it by itself.
UNSHOWN = {"strided_offsets"}
# Those that change PyTorch itself, so that the program runs right with them.
WHOLE = {name for name, fault in FAULTS.items() if PATCHES[name].changes is not None}

CHILD = """
import contextlib, os, sys, warnings
import torch, torch._functorch.config, hop
from hop.compat.patches import PATCHES

warnings.simplefilter("ignore")
torch._functorch.config.enable_autograd_cache = True


def one_process():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    os.environ |= {{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


def fault():{body}


if {taken_back}:
    PATCHES[sys.argv[1]].take_back()
try:
    shows = bool(fault())
except Exception as e:
    print(f"{{type(e).__name__}}: {{e}}"[:500], file=sys.stderr)
    shows = True
print(shows, flush=True)
os._exit(0)  # Gloo's threads may abort a process that shuts down
"""


def shows(name: str, folder: Path, *, taken_back: bool) -> bool:
    """Whether the fault shows in a process of its own."""
    body = textwrap.indent(textwrap.dedent(FAULTS[name]), "    ")
    code = CHILD.format(body=body, taken_back=taken_back)
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / f"{taken_back}")}
    done = forks.run(code, name, str(folder), env=env)
    if done.returncode == -signal.SIGSEGV and name in CRASHES and taken_back:
        return True
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() in ("True", "False"), done.stdout
    return done.stdout.strip() == "True"


@pytest.mark.full
@pytest.mark.compiler
class TestFaults:
    @pytest.mark.parametrize("name", FAULTS)
    def test_shows_without_the_patch_in_the_versions_named(self, name, tmp_path):
        if name == "hashes_of_local_tensors" and not PATCHES[name].is_needed:
            pytest.skip("this version of torch caches no program of DTensors")
        if name == "loads_of_part_vectors" and platform.machine() not in ("x86_64", "AMD64"):
            pytest.skip("needs a compiler for AVX2")
        assert shows(name, tmp_path, taken_back=True) == PATCHES[name].is_needed

    @pytest.mark.parametrize("name", sorted(WHOLE))
    def test_does_not_show_with_it(self, name, tmp_path):
        if PATCHES[name].is_needed:
            assert not shows(name, tmp_path, taken_back=False)


class TestRecords(unittest.TestCase):
    def test_each_has_a_program(self):
        assert FAULTS.keys() | UNSHOWN == PATCHES.keys()

    @parameterized.expand(list(PATCHES))
    def test_is_active_where_it_is_needed(self, name):
        assert PATCHES[name].active == PATCHES[name].is_needed

    @parameterized.expand(list(PATCHES))
    def test_some_tested_version_has_the_fault(self, name):
        assert any(map(PATCHES[name].has_fault, TESTED))
