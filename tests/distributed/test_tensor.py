"""Collectives of quantized tensors, and DTensors of them, over several processes, against one process bit for bit."""

import copy
import math
import os
import tempfile
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import hop
from hop import presets
from hop.numerics.quantizer import Quantizer
from hop.tensor import table
from tests.support import forks
from tests.support.processes import run
from tests.support.wire import Wire

aten = torch.ops.aten
COLLECTIVES = {op for op in table.rules() if op.namespace in ("c10d", "_c10d_functional")}
REFUSED = "DTensor cannot place a QuantizedTensor"
FORMATS = tuple(presets.PRESETS.values())  # in every collective, and as the parts of DTensors in every way


def quantized(q: Quantizer, shape: tuple[int, ...] = (64, 256), seed: int = 0) -> Any:
    """The same in every process for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    given: dict[str, Tensor] = {}
    if q.scale.missing() is not None:
        size, _ = q.buffers(shape)["scale"]
        given = {"scale": torch.full(size, 0.02)}
        if q.scale.has_zero_point():
            given["zero_point"] = torch.full(size, 3, dtype=q.format.dtype)
    if q.stochastic:
        given["noise"] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return hop.quantize(q, torch.randn(shape, generator=generator), **given)


def numbers(x: Any) -> Tensor:
    assert type(x) is hop.QuantizedTensor, type(x)
    return x.numbers()


def raises(error: type[Exception], text: str, call: Any, *args: Any, **kwargs: Any) -> None:
    with unittest.TestCase().assertRaisesRegex(error, text):
        call(*args, **kwargs)


# ---- collectives


def every_format(mesh: Any, rank: int) -> None:
    group, world = mesh.get_group(), mesh.size()
    for q in FORMATS:
        every = [quantized(q, seed=r) for r in range(world)]
        t, all_numbers = every[rank], [x.numbers() for x in every]
        assert torch.equal(numbers(funcol.all_gather_single(t, 0, group)), torch.cat(all_numbers))
        if not q.flat:
            assert torch.equal(numbers(funcol.all_gather_single(t, 1, group)), torch.cat(all_numbers, 1))
        total = sum(all_numbers[1:], all_numbers[0])
        assert torch.equal(funcol.all_reduce(t, "sum", group), total)
        assert torch.equal(funcol.all_reduce(t, "avg", group), total / world)
        assert torch.equal(funcol.all_reduce(t, "max", group), torch.stack(all_numbers).amax(0))
        assert torch.equal(funcol.reduce_scatter_single(t, "sum", 0, group), total.chunk(world)[rank])
        assert torch.equal(numbers(funcol.broadcast(t, world - 1, group)), all_numbers[-1])
        if q == presets.FP8_128X128:
            raises(RuntimeError, "128 elements along dimension 0 share", _all_to_all, t, group)
            continue
        want = torch.cat([x.chunk(world)[rank] for x in all_numbers])
        assert torch.equal(numbers(_all_to_all(t, group)), want)


def _all_to_all(t: Any, group: Any) -> Any:
    return funcol.all_to_all_single(t, None, None, group)


def in_place(mesh: Any, rank: int) -> None:
    """What DTensor distributes tensors by."""
    group, world = mesh.get_group(), mesh.size()
    for q in (presets.INT8_TENSOR, presets.MXFP8, presets.NVFP4, presets.UINT4_32_AFFINE, presets.STATE4):
        every = [quantized(q, seed=r) for r in range(world)]
        t, all_numbers = every[rank], [x.numbers() for x in every]
        for asynchronous in (False, True):

            def done(work: Any, asynchronous: bool = asynchronous) -> None:
                assert (work is not None) == asynchronous
                if work is not None:
                    work.wait()

            one = t.clone()
            done(dist.broadcast(one, world - 1, group, asynchronous))
            assert torch.equal(numbers(one), all_numbers[-1])
            one = torch.zeros_like(t)
            done(dist.scatter(one, every if rank == 0 else None, 0, group, asynchronous))
            assert torch.equal(numbers(one), all_numbers[rank])
    refused(group, world)


def several_at_once(mesh: Any, rank: int) -> None:
    """Lists of tensors, of one quantizer each."""
    group, world = mesh.get_group(), mesh.size()
    quantizers = (presets.INT8_ROW, presets.NVFP4)
    every = [[quantized(q, seed=r) for r in range(world)] for q in quantizers]
    mine, all_numbers = [e[rank] for e in every], [[t.numbers() for t in e] for e in every]
    totals = [sum(n[1:], n[0]) for n in all_numbers]
    own = [total.chunk(world)[rank] for total in totals]
    for got, want in zip(funcol.all_gather_into_tensor_coalesced(mine, group), all_numbers, strict=True):
        assert torch.equal(numbers(got), torch.cat(want))
    for got, want in zip(funcol.all_reduce_coalesced(mine, "sum", group), totals, strict=True):
        assert torch.equal(got, want)
    got = funcol.reduce_scatter_tensor_coalesced(mine, "sum", [0, 0], group)
    assert all(torch.equal(a, b) for a, b in zip(got, own, strict=True))


def every_collective(mesh: Any, rank: int) -> None:
    """All rules of collectives run."""
    ran, rules = set(), table.rules()
    for op in COLLECTIVES:

        def noted(op: Any, *args: Any, rule: Any = rules[op], **kwargs: Any) -> Any:
            ran.add(op)
            return rule(op, *args, **kwargs)

        rules[op] = noted
    every_format(mesh, rank)
    in_place(mesh, rank)
    several_at_once(mesh, rank)
    assert ran == COLLECTIVES, COLLECTIVES - ran


def refused(group: Any, world: int) -> None:
    """On all processes, before anything is sent."""
    t, other = quantized(presets.INT8_ROW), quantized(presets.MXFP8)
    raises(ValueError, "quantized alike", dist.scatter, torch.zeros_like(other), [t] * world, dist.get_rank(), group)
    for call, *args in (
        (dist.all_gather, [torch.zeros_like(t)] * world, t),
        (dist.all_gather_into_tensor, torch.zeros(64 * world, 256), t),
        (dist.all_reduce, t),
        (dist.send, t, 1 - dist.get_rank()),
    ):
        raises(NotImplementedError, "has no rule for a QuantizedTensor.*hop.dequantize it first", call, *args)
    raises(NotImplementedError, "must be one of", funcol.all_reduce, t, "product", group)
    raises(NotImplementedError, "has no rule", torch.ops._c10d_functional.all_reduce_, t, "sum", group.group_name)
    ragged = quantized(presets.FP8_128X128, (200, 256))
    raises(RuntimeError, "128 elements along dimension 0", funcol.all_gather_single, ragged, 0, group)
    both = hop.quantize(presets.MXFP8, torch.randn(64, 256), usages=("rowwise", "columnwise"))
    raises(RuntimeError, "column-wise", funcol.all_gather_single, both, 0, group)
    codes = hop.quantize(presets.INT8_ROW, torch.zeros(8, 8))
    odd = hop.quantize(presets.INT4_32, torch.randn(7))
    raises(RuntimeError, "share a byte", funcol.all_gather_single, odd, 0, group)
    assert torch.equal(numbers(codes), torch.zeros(8, 8))


def traffic(mesh: Any, rank: int) -> None:
    group, x = mesh.get_group(), torch.randn(1024, 1024)
    with Wire() as plain:
        funcol.all_gather_single(x, 0, group).wait()
    assert plain.nbytes == x.nbytes
    bounds = {presets.INT8_ROW: 0.27, presets.FP8_ROW: 0.27, presets.MXFP8: 0.27, presets.FP8_128X128: 0.27}
    bounds |= {presets.NVFP4: 0.16, presets.INT4_128: 0.16, presets.MXFP4: 0.16}
    for q, bound in bounds.items():
        t = hop.quantize(q, x)
        with Wire() as wire:
            funcol.all_gather_single(t, 0, group)
        # an amax of a whole tensor travels once for each row: the rows of what is gathered keep theirs
        amax = 4 * (len(x) - 1) if q == presets.NVFP4 else 0
        assert wire.nbytes == t.nbytes + amax, (q, wire.nbytes, t.nbytes)
        d = distribute_tensor(t, mesh, [Shard(0)])  # half of it, which its process sends
        calls = (
            lambda t=t: funcol.all_gather_single(t, 0, group),
            lambda d=d: (d.full_tensor(), d.full_tensor()),
        )
        for call in calls:
            with Wire() as wire:
                call()
            assert 0.1 < wire.nbytes / x.nbytes <= bound, (q, wire.nbytes / x.nbytes)
            # no numbers: only the scales of some formats are floats
            assert not wire.dtypes & {torch.bfloat16, torch.float16, torch.float64}


# ---- DTensors


def placements(mesh: Any) -> list[list[Any]]:
    kinds = (Replicate(), Shard(0), Shard(1))
    return (
        [[p] for p in kinds]
        if mesh.ndim == 1
        else [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Shard(0)]]
    )


def distributed(mesh: Any, shapes: Any) -> Iterator[tuple[Quantizer, Any, Any]]:
    """Every format, placed in every way that cuts no block: quantizer, tensor, DTensor."""
    for shape in shapes:
        for q in FORMATS:
            t, placed = quantized(q, shape), 0
            for placement in placements(mesh):
                try:
                    d = distribute_tensor(t, mesh, placement)
                except RuntimeError as error:
                    assert REFUSED in str(error), error
                    assert any(p.is_shard() for p in placement)
                    continue
                placed += 1
                yield q, t, d
            assert placed or mesh.ndim > 1


def one_thread(mesh: Any, rank: int) -> None:
    """hop.distributed.gloo's groups, and those that are made of them."""
    groups = (mesh.get_group(), torch.distributed.group.WORLD, torch.distributed.new_group([0, 1]))
    assert [g._get_backend(torch.device("cpu")).options._threads for g in groups] == [1, 1, 1]  # type: ignore[union-attr]


def even(mesh: Any, rank: int) -> None:
    _placements_of(mesh, [(64, 256)])


def uneven(mesh: Any, rank: int) -> None:
    """Parts that are shorter, and empty ones."""
    _placements_of(mesh, [(5, 64)])
    d = distribute_tensor(quantized(presets.INT8_ROW, (3, 128)), mesh, [Shard(0)])
    size = math.ceil(3 / mesh.size())
    assert numbers(d.to_local()).shape == (min(max(3 - size * rank, 0), size), 128)


def two_dimensions(mesh: Any, rank: int) -> None:
    _placements_of(init_device_mesh("cpu", (2, 2)), [(64, 256)])


def _placements_of(mesh: Any, shapes: Any) -> None:
    for _, t, d in distributed(mesh, shapes):
        want = t.numbers()
        assert type(d.to_local()) is hop.QuantizedTensor and d.to_local().dtype == t.dtype
        assert torch.equal(numbers(d.full_tensor()), want)
        for target in placements(mesh):
            try:
                moved = d.redistribute(mesh, target)
            except RuntimeError as error:
                assert REFUSED in str(error), error
                continue
            assert torch.equal(numbers(moved.full_tensor()), want)


def refuses_to_cut(mesh: Any, rank: int) -> None:
    """What cuts blocks or bytes says which, and gives no plain tensor."""
    for q, shape, dim, text in (
        (presets.MXFP8, (64, 96), 1, "32 elements along dimension 1 .*48:96:1"),
        (presets.FP8_128X128, (384, 256), 0, "128 elements along dimension 0 .*192:384:1"),
        (presets.INT4_128, (64, 256 + 128), 1, "128 elements along dimension 1"),
        (presets.STATE8, (6, 128), 0, "share a byte or a scale"),
    ):
        t = quantized(q, shape)
        for source in (0, None):
            raises(
                RuntimeError, f"(?s){REFUSED}.*{text}", distribute_tensor, t, mesh, [Shard(dim)], src_data_rank=source
            )
        whole = distribute_tensor(t, mesh, [Replicate()])
        raises(RuntimeError, f"(?s){REFUSED}.*{text}", whole.redistribute, mesh, [Shard(dim)])
    part = DTensor.from_local(quantized(presets.INT8_ROW), mesh, [Partial()])
    raises(ValueError, "sums that no", hop.scaled, aten.relu.default, torch.float32, part)


def operators(mesh: Any, rank: int) -> None:
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(9))
    dx = distribute_tensor(x, mesh, [Replicate()])
    for _, t, d in distributed(mesh, [(64, 256)]):
        want, d = t.numbers(), d.requires_grad_()
        y = hop.dequantize(d)
        assert y.placements == d.placements and torch.equal(y.full_tensor(), want)
        y.full_tensor().square().sum().backward()
        assert torch.equal(d.grad.full_tensor(), 2 * want) and not hasattr(d.grad.to_local(), "quantizer")
        d.grad = None
        one = t.detach().requires_grad_()
        product = hop.scaled(aten.linear.default, torch.float32, x, one)
        product.square().sum().backward()
        got = hop.scaled(aten.linear.default, torch.float32, dx, d)
        torch.testing.assert_close(got.full_tensor(), product, rtol=1e-4, atol=1e-4)
        got.full_tensor().square().sum().backward()
        torch.testing.assert_close(d.grad.full_tensor(), one.grad, rtol=1e-4, atol=1e-3)
        d = d.detach()
        plain = torch.nn.functional.linear(dx, d).full_tensor()
        torch.testing.assert_close(plain, torch.nn.functional.linear(x, want), rtol=1e-4, atol=1e-3)
        wide = hop.out_dtype(aten.mm.default, torch.float32, d, dx.t())
        torch.testing.assert_close(wide.full_tensor(), want @ x.t(), rtol=1e-4, atol=1e-3)
        half = d.to(torch.bfloat16)
        assert half.dtype == half.to_local().dtype == numbers(half.full_tensor()).dtype == torch.bfloat16
        for same in (d.clone(), copy.deepcopy(d), DTensor.from_local(d.to_local(), mesh, d.placements)):
            assert torch.equal(numbers(same.full_tensor()), want)
        assert torch.equal(hop.dequantize(d.view(64, 1, 256)).full_tensor(), want.view(64, 1, 256))
        if t.quantizer.per_byte() == 1 and not t.quantizer.flat:
            for transposed in (d.t(), d.transpose(0, 1)):
                assert torch.equal(numbers(transposed.full_tensor()), want.t())


def compiled(mesh: Any, rank: int) -> None:
    group = mesh.get_group()

    def gathered(t: Any) -> Tensor:
        return hop.dequantize(funcol.all_gather_single(t, 0, group)) * 2

    def returned(t: Any) -> Any:
        return funcol.all_gather_single(t, 0, group)

    def summed(t: Any) -> Tensor:
        return funcol.reduce_scatter_single(t, "sum", 0, group) + 1

    def exchanged(t: Any) -> Tensor:
        return hop.dequantize(funcol.all_to_all_single(t, None, None, group)) + 1

    for dynamic in (False, True):
        for function in (gathered, returned, summed, exchanged):
            _same_compiled(function, (quantized(presets.NVFP4, seed=rank),), dynamic=dynamic)


def compiled_dtensors(mesh: Any, rank: int) -> None:
    x = distribute_tensor(torch.randn(32, 256, generator=torch.Generator().manual_seed(9)), mesh, [Replicate()])
    d = distribute_tensor(quantized(presets.MXFP8), mesh, [Shard(0)])

    def product(d: Any, x: Any) -> Tensor:
        return hop.scaled(aten.linear.default, torch.float32, x, d).full_tensor()

    def whole(d: Any, x: Any) -> Any:
        return d.full_tensor()

    def local(d: Any, x: Any) -> Any:
        return hop.dequantize(d) + 1

    for dynamic in (False, True):
        for function in (product, whole, local):
            _same_compiled(function, (d, x), dynamic=dynamic)


def compiled_by_inductor(mesh: Any, rank: int) -> None:
    group = mesh.get_group()

    def both(t: Any, d: Any) -> tuple[Tensor, Tensor]:
        return hop.dequantize(funcol.all_gather_single(t, 0, group)) * 2, hop.dequantize(d.full_tensor()) + 1

    d = distribute_tensor(quantized(presets.MXFP8), mesh, [Shard(0)])
    _same_compiled(both, (quantized(presets.NVFP4, seed=rank), d), backend="inductor")


def _same_compiled(function: Any, args: Any, backend: str = "aot_eager", dynamic: bool = False) -> None:
    torch._dynamo.reset()
    got = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    want = function(*args)
    for a, b in zip(*([x] if not isinstance(x, tuple) else x for x in (got, want)), strict=True):
        a, b = (x.full_tensor() if isinstance(x, DTensor) else x for x in (a, b))
        a, b = (numbers(x) if isinstance(b, hop.QuantizedTensor) else x for x in (a, b))
        assert torch.equal(a, b), function


# ---- in this process


class TestPad(unittest.TestCase):
    def test_zeros_behind(self):
        for q in FORMATS:
            t = quantized(q, (5, 70))
            for more in ((0, 0, 0, 3), (0, 58), (0, 1, 0, 2)):
                want = torch.nn.functional.pad(t.numbers(), more)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    got = torch.nn.functional.pad(t, more)
                if q.flat and more[1]:
                    self.assertIs(type(got), Tensor)  # the rows would move
                elif q != presets.STATE4_UNSIGNED:  # which has no zero
                    self.assertIs(type(got), hop.QuantizedTensor)
                    self.assertEqual(got.quantizer, q)
                shown = got.numbers() if type(got) is hop.QuantizedTensor else got
                self.assertTrue(torch.equal(shown, want), (q, more))

    def test_other_padding_dequantizes(self):
        t = quantized(presets.MXFP8)
        for more, value in (((1, 0), 0.0), ((0, 1), 1.0), ((0, -1), 0.0)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got = torch.nn.functional.pad(t, more, value=value)
            self.assertTrue(torch.equal(got, torch.nn.functional.pad(t.numbers(), more, value=value)))


CACHED = """
import os, sys, torch, torch._functorch.config, hop
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
torch._functorch.config.enable_autograd_cache = True
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
t = hop.quantize(getattr(hop.presets, sys.argv[1]), x)
d = distribute_tensor(t, mesh, [Shard(0)])
def f(d):
    return d.detach().clone()
got = torch.compile(f, fullgraph=True)(d).to_local()
assert got.quantizer == t.quantizer, (got.quantizer, t.quantizer)
assert torch.equal(got.numbers(), t.numbers())
from torch._dynamo.utils import counters
print(counters["aot_autograd"]["autograd_cache_hit"], flush=True)
os._exit(0)
"""


@pytest.mark.full
class TestProcesses(unittest.TestCase):
    def test_every_collective(self):
        run(every_collective)

    def test_traffic(self):
        run(traffic)

    def test_even(self):
        run(even)

    def test_uneven_over_four(self):
        run(uneven, 4)

    def test_gloo_has_one_thread(self):
        run(one_thread)

    def test_two_dimensions(self):
        run(two_dimensions, 4)

    def test_refuses_to_cut(self):
        run(refuses_to_cut)

    def test_operators(self):
        run(operators)

    def test_compiled(self):
        run(compiled)

    def test_compiled_dtensors(self):
        run(compiled_dtensors)

    def test_compiled_by_inductor(self):
        run(compiled_by_inductor)

    def test_formats_do_not_share_programs_on_disk(self):
        """DTensors of two formats, alike but for their local tensors, with one cache."""
        with tempfile.TemporaryDirectory() as folder:
            found = [_cached(name, folder) for name in ("MXFP8", "MXFP8_E5M2", "FP8_ROW", "MXFP8")]
        self.assertEqual([0, 0, 0, 1], found)


def _cached(name: str, folder: str) -> int:
    """How many programs a process of its own found in the cache."""
    done = forks.run(CACHED, name, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)
