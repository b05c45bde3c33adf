"""Programs with our operators in PyTorch's caches on disk: found again, but only by what they were compiled for."""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

import hop
from hop import nn, presets, schemes
from hop.compat import values
from hop.compat.patches import CACHED, PATCHES
from hop.kernels.cpu import native
from hop.numerics.functions import of_runtime
from hop.numerics.spelling import Value
from hop.optim import step
from hop.tensor.buffers.noise import noise
from tests.support import forks

aten = torch.ops.aten


@contextlib.contextmanager
def without_patch(name):
    """PyTorch as it is without one of our patches."""
    PATCHES[name].take_back()
    try:
        yield
    finally:
        PATCHES[name].apply()


CHANGES = {
    "sources": lambda: mock.patch.object(values, "sources", lambda: "others"),
    "native library": lambda: mock.patch.dict(native.library().__dict__, digest="another"),
    "CPU level": lambda: native.use("off"),
    "patch": lambda: without_patch("loops_that_do_not_divide"),
    "patch_torch": hop.patch_torch,
    "environment": lambda: mock.patch.dict(os.environ, HOP_KERNELS="/nowhere"),
    "arithmetic": of_runtime,
}
"""Contexts, each of which changes one thing that programs depend on."""


class TestKey:
    @pytest.mark.parametrize("name", CHANGES)
    def test_depends_on(self, name):
        before = values.program_key()
        with CHANGES[name]():
            inside = values.program_key()
            assert inside != before and values.program_key() == inside
        assert values.program_key() == before

    def test_does_not_depend_on_how_the_level_was_chosen(self):
        before = values.program_key()
        with mock.patch.dict(os.environ, HOP_NATIVE=native.library().path, HOP_CACHE_DIR="/nowhere"):
            assert values.program_key() == before

    def test_depends_on_classes_of_others(self, monkeypatch):
        """A digest of our sources does not cover them, so no two processes may have the same key."""
        monkeypatch.setattr(values, "FOREIGN", {})
        keys = [values.program_key()]
        for _ in range(2):

            @dataclass(frozen=True)
            class Own(Value):
                pass

            keys.append(values.program_key())
        assert len(set(keys)) == 3 and values.program_key() == keys[-1]
        assert values.program_key(lowers_values=False) == keys[0]

    @pytest.mark.full
    def test_does_not_depend_on_imports(self):
        """A process that has imported more finds the programs of one that has imported less."""
        code = "import sys, hop\nfor name in sys.argv[1:]: __import__(name)\n"
        code += "from hop.compat import values\nprint(values.program_key())"
        keys = {
            subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=True).stdout
            for names in ((), ("hop.export", "hop.optim", "hop.compat.stock", "hop.integrations"))
        }
        assert len(keys) == 1


class TestOperators:
    def test_are_cacheable(self):
        from hop.dispatch.hop import hops

        ours = [op for op in hops if values.is_ours(type(op))]
        assert ours and all(op.cacheable() for op in ours)

    def test_of_others_are_not(self):
        from hop.dispatch import hop as module

        with mock.patch.object(module, "hops", []), mock.patch.dict(module.compiled.operators):

            class Other(hop.dispatch.hop.Hop):
                def check(self, *args):
                    return args, {}

                def reference(self, x):
                    return x + 1

            assert not Other("of_a_test").cacheable()


def layer(scheme):
    torch.manual_seed(0)
    return hop.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 32)).eval(), scheme)


def traced(function):
    """The targets of the nodes that Dynamo makes of a function, in a graph that AOTAutograd's cache accepts."""
    from torch._functorch._aot_autograd.autograd_cache import check_cacheable

    targets = set()

    def backend(gm, _):
        check_cacheable(gm)
        targets.update(node.target for node in gm.graph.nodes if node.op == "call_function")
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)()
    return targets


def optimizer_step():
    p = torch.nn.Parameter(torch.ones(64, 128))
    p.grad = torch.ones_like(p)
    return hop.optim.AdamW([p]).step


def reference_step():
    """A step in plain ATen, as it is compiled for GPUs."""
    q, p = hop.optim.FP8["exp_avg"], torch.ones(64, 100)
    buffers = list(hop.quantize(q, p).buffers().values())
    numbers = torch.tensor([0.1, 0.9, 1.0, 0.01, 0.0])
    return lambda: step.write_updated("sgd coupled", numbers, None, 0, p, p.clone(), [str(q)], buffers)


class TestFunctions:
    @pytest.mark.full
    def test_are_accepted(self):
        """Each function that Dynamo records as a node, in a program."""
        x, codes = torch.ones(4, 64), torch.ones(4, 64, dtype=torch.int8)
        weight, scale = torch.ones(8, 64), torch.ones(4, 1)
        packed = hop.quantize(presets.INT8_ROW, weight)
        delayed = nn.Linear(64, 32, scheme=hop.recipes.FP8_DELAYED)
        seed, frozen = torch.tensor(3), layer("int8")
        found = set().union(
            *map(
                traced,
                (
                    lambda: hop.quantized(
                        aten.linear.default, schemes.INT8_DYNAMIC, x, weight, scales=hop.Scales(lhs=scale)
                    ),
                    lambda: hop.scaled(aten.mm.default, torch.float32, x, packed.t()),
                    lambda: hop.out_dtype(aten.mm.default, torch.int32, codes, codes.t()),
                    lambda: hop.dequantize(hop.quantize(presets.INT8_ROW, x)),
                    lambda: hop.fake_quantize(presets.INT8_ROW, x),
                    lambda: hop.unpack(hop.pack(packed)),
                    lambda: hop.from_codes(presets.INT8_ROW, codes, scale),
                    lambda: noise(seed, (4, 4)),
                    lambda: frozen(x),
                    lambda: delayed(x),
                    optimizer_step(),
                    reference_step(),
                ),
            )
        )
        assert found >= CACHED, {f.__qualname__ for f in CACHED - found}


@contextlib.contextmanager
def with_classes_of_others():
    with mock.patch.dict(values.FOREIGN, Own="a number"):
        yield


def hits(function, *args):
    """Compile a function anew: its result, and whether AOTAutograd's cache had the program."""
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        y = torch.compile(function, fullgraph=True)(*args)
    found = counters["aot_autograd"]
    assert not found["autograd_cache_bypass"], found
    return y, found["autograd_cache_hit"]


@pytest.mark.compiler
class TestPrograms:
    @pytest.mark.full
    @pytest.mark.parametrize("name", CHANGES)
    def test_miss_after_a_change(self, name):
        """A program is compiled anew where something changed that it depends on, and found again afterwards."""
        model, x = layer("int8"), torch.randn(3, 64)
        with torch._inductor.utils.fresh_cache():
            want, first = hits(model, x)
            with CHANGES[name]():
                inside, changed = hits(model, x)
            again, last = hits(model, x)
        assert (first, changed, last) == (0, 0, 1)
        torch.testing.assert_close(inside, want)
        assert torch.equal(again, want)

    @pytest.mark.full
    def test_classes_of_others_concern_programs_of_ours(self):
        """A program of PyTorch's own operators is shared between processes, whatever classes they define."""
        x = torch.randn(3, 64)
        with torch._inductor.utils.fresh_cache():
            for function, want in ((torch.nn.Linear(64, 8), 1), (layer("int8"), 0)):
                hits(function, x)
                with with_classes_of_others():
                    assert hits(function, x)[1] == want

    @pytest.mark.full
    def test_of_later_processes(self, tmp_path):
        """Another process finds programs of layers, of symbolic sizes and with gradients, and gets the same results."""
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        first, second = (json.loads(run(env, str(rows))) for rows in (5, 9))
        assert [kind["hits"] for kind in first.values()] == [0, 0, 0], first
        assert [kind["hits"] for kind in second.values()] == [1, 1, 1], second
        assert all(kind["equal"] for kind in (*first.values(), *second.values()))


CHILD = """
import json, sys, torch, hop
from torch._dynamo.utils import counters

torch.manual_seed(0)
model = hop.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)), "int8")
trained = hop.nn.convert(torch.nn.Sequential(torch.nn.Linear(64, 32)), hop.schemes.INT8_DYNAMIC)
found = {}


def run(name, compiled, x):
    counters.clear()
    y, want = compiled(x), (model if name != "trained" else trained)(x)
    equal = torch.allclose(y, want, atol=1e-2)
    if y.requires_grad:
        y.sum().backward()
    caches = counters["aot_autograd"]
    assert not caches["autograd_cache_bypass"], caches
    found[name] = {"hits": caches["autograd_cache_hit"], "equal": equal}


x = torch.randn(int(sys.argv[1]), 64)
with torch.no_grad():
    run("static", torch.compile(model, fullgraph=True, dynamic=False), torch.randn(4, 64))
    run("symbolic", torch.compile(model, fullgraph=True, dynamic=True), x)
run("trained", torch.compile(trained, fullgraph=True, dynamic=False), torch.randn(4, 64))
print(json.dumps(found))
"""


def run(env, *arguments):
    done = forks.run(CHILD, *arguments, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]
