"""Optimizers with quantized states under DTensor and FSDP2: each process holds the states of its own parts, quantized
in blocks over each part."""

import contextlib
import functools
import itertools
import os
import tempfile
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import hop
import hop.checkpoint
from hop import optim
from tests.support.processes import run

KINDS: dict[str, Any] = {
    "adamw8": optim.AdamW8bit,
    "adamw_fp8": optim.AdamWFp8,
    "adamw4": optim.AdamW4bit,
    "sgd": functools.partial(optim.SGD, momentum=0.9, weight_decay=0.1),
    "lion": functools.partial(optim.Lion, weight_decay=0.1),
}
LR = 1e-2
MIN_NUMEL = 4096
# Over 4 processes: rows of 16; of 3, 3, 3, 1; of 1, 1, 1 and none; a vector; one whose states stay floats.
SHAPES = ((64, 100), (10, 700), (3, 2000), (8192,), (5,))


def numbers(shape: Any, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameters(mesh: Any, dtype: torch.dtype, placement: Any, shapes: Any = SHAPES) -> list[nn.Parameter]:
    return [
        nn.Parameter(distribute_tensor(numbers(shape, i, dtype), mesh, [placement])) for i, shape in enumerate(shapes)
    ]


def alone(params: Any, kind: str) -> tuple[list[nn.Parameter], Any]:
    """An optimizer of this process alone, on copies of its own parts, which quantizes the same states."""
    own = [nn.Parameter(p.detach().to_local().clone()) for p in params]
    pairs = list(zip(params, own, strict=True))
    large = [b for a, b in pairs if a.numel() >= MIN_NUMEL]
    small = [b for a, b in pairs if a.numel() < MIN_NUMEL]
    groups: list[Any] = [{"params": large}, {"params": small, "state": None}]
    return own, KINDS[kind]([g for g in groups if g["params"]], lr=LR, min_numel=0)


def assert_bits(a: Any, b: Any, where: Any) -> None:
    """Equal to the bit, codes and scales too."""
    a, b = (x.to_local() if isinstance(x, DTensor) else x for x in (a.detach(), b.detach()))
    assert type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape, (where, a, b)
    if isinstance(a, hop.QuantizedTensor):
        assert a.quantizer == b.quantizer, where
        for name, x in a.buffers().items():
            assert torch.equal(x.view(torch.uint8), b.buffers()[name].view(torch.uint8)), (where, name)
    else:
        assert torch.equal(a, b), (where, (a.float() - b.float()).abs().max())


def assert_same(params: Any, sharded: Any, own: Any, single: Any, where: Any) -> None:
    for i, (p, q) in enumerate(zip(params, own, strict=True)):
        assert_bits(p, q, (where, i))
        assert set(sharded.state[p]) == set(single.state[q])
        for name, x in sharded.state[p].items():
            if name != "step":
                assert x.dtype == p.dtype and isinstance(x, DTensor) and x.placements == p.placements, (where, i, name)
                assert isinstance(x.to_local(), hop.QuantizedTensor) == (p.numel() >= MIN_NUMEL), (where, i, name)
            assert_bits(x, single.state[q][name], (where, i, name))


def compiled(optimizer: Any, backend: str | None) -> Any:
    return (
        optimizer.step if backend is None else torch.compile(lambda: optimizer.step(), fullgraph=True, backend=backend)
    )


def trained(
    mesh: Any,
    kind: str,
    dtype: torch.dtype,
    placement: Any,
    backend: str | None = None,
    steps: int = 3,
    shapes: Any = SHAPES,
) -> None:
    """Steps on the same numbers, sharded and in this process alone."""
    params = parameters(mesh, dtype, placement, shapes)
    sharded = KINDS[kind](params, lr=LR, min_numel=MIN_NUMEL)
    own, single = alone(params, kind)
    step = compiled(sharded, backend)
    for i in range(steps):
        for k, (p, q) in enumerate(zip(params, own, strict=True)):
            p.grad = distribute_tensor(numbers(p.shape, 100 * (i + 1) + k, dtype), mesh, [placement])
            q.grad = p.grad.to_local().clone()
        step()
        single.step()
    assert_same(params, sharded, own, single, (kind, dtype, placement, backend))


# ---- what runs in each process


def eager(mesh: Any, rank: int) -> None:
    for kind in KINDS:
        trained(mesh, kind, torch.bfloat16, Shard(0))
        trained(mesh, kind, torch.float32, Shard(0) if kind in ("adamw8", "lion") else Replicate())


def graphs(mesh: Any, rank: int) -> None:
    """The whole step as one graph."""
    for kind, dtype in (("sgd", torch.float32), ("adamw4", torch.bfloat16)):
        torch._dynamo.reset()
        trained(mesh, kind, dtype, Shard(0), "aot_eager", 2, SHAPES[1:2])


def placed_otherwise(mesh: Any, rank: int) -> None:
    """States of one process, loaded where parameters are sharded, and back; and of rows where columns are held."""
    values = numbers((40, 300), 0, torch.float32)
    placements = {"whole": None, "rows": Shard(0), "columns": Shard(1)}

    def made(placement: Any) -> Any:
        p = nn.Parameter(values.clone() if placement is None else distribute_tensor(values, mesh, [placement]))
        return p, optim.AdamW8bit([p], lr=LR)

    for one, other in itertools.permutations(placements, 2):
        p, optimizer = made(placements[one])
        grad = numbers(values.shape, 1, torch.float32)
        p.grad = grad if placements[one] is None else distribute_tensor(grad, mesh, [placements[one]])
        optimizer.step()
        q, loaded = made(placements[other])
        loaded.load_state_dict(optimizer.state_dict())
        for name in ("exp_avg", "exp_avg_sq"):
            x: Any = loaded.state[q][name]
            local = x if placements[other] is None else x.to_local()
            want = wide(optimizer.state[p][name])
            own = want if placements[other] is None else distribute_tensor(want, mesh, [placements[other]]).to_local()
            assert_bits(local, hop.quantize(local.quantizer, own), (one, other, name))
        q.grad = torch.ones_like(q)
        loaded.step()


def model(mesh: Any, dtype: torch.dtype) -> nn.Sequential:
    """Under FSDP2 where there is a mesh; its rows for 4 processes are 38, 38, 38, 36 and 9, 9, 9, 6."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(32, 150), nn.Tanh(), nn.Linear(150, 33)).to(dtype)
    for layer in (made[0], made[2], made) if mesh is not None else ():
        fully_shard(layer, mesh=mesh)
    return made


def backward(module: nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Gradients of the same numbers in every process, clipped."""
    module.zero_grad()
    module(numbers((8, 32), seed, dtype)).square().sum().backward()
    nn.utils.clip_grad_norm_(module.parameters(), 0.5)


def fsdp(mesh: Any, rank: int) -> None:
    """A model under FSDP2, whose gradients are clipped, one of which is missing at times."""
    for kind in ("adamw8", "adamw_fp8", "adamw4", "sgd"):
        for dtype in (torch.float32, torch.bfloat16):
            module = model(mesh, dtype)
            params = list(module.parameters())
            sharded = KINDS[kind](params, lr=LR, min_numel=MIN_NUMEL)
            own, single = alone(params, kind)
            for i in range(3):
                backward(module, dtype, i)
                total = torch.stack([p.grad.full_tensor().float().square().sum() for p in params]).sum().sqrt()
                assert 0.49 < total < 0.51
                params[2].grad = None if i == 0 else params[2].grad
                for p, q in zip(params, own, strict=True):
                    q.grad = None if p.grad is None else p.grad.to_local().clone()
                sharded.step()
                single.step()
                assert (params[2] in sharded.state) == (i > 0)
            assert sharded.state[params[2]]["step"] == 2 and sharded.state[params[0]]["step"] == 3
            assert_same(params, sharded, own, single, (kind, dtype))


def near_torch(mesh: Any, rank: int) -> None:
    """The whole parameters are near those of torch.optim.AdamW in one process: an update of at most lr each step, which
    8 bits change by a few hundredths and 4 bits by a few tenths."""
    for kind, bound in (("adamw8", 0.1), ("adamw_fp8", 0.2), ("adamw4", 0.5)):
        params = parameters(mesh, torch.float32, Shard(0))
        start = [p.detach().full_tensor().clone() for p in params]
        whole = [nn.Parameter(p.clone()) for p in start]
        sharded, single = KINDS[kind](params, lr=LR), torch.optim.AdamW(whole, lr=LR, foreach=False)
        for i in range(4):
            for k, (p, q) in enumerate(zip(params, whole, strict=True)):
                q.grad = numbers(p.shape, 100 * (i + 1) + k, torch.float32)
                p.grad = distribute_tensor(q.grad, mesh, [Shard(0)])
            sharded.step()
            single.step()
        for p, q, old in zip(params, whole, start, strict=True):
            moved, wanted = p.detach().full_tensor() - old, q.detach() - old
            assert (moved - wanted).norm() <= bound * wanted.norm(), (kind, (moved - wanted).norm() / wanted.norm())


def nonfinite(mesh: Any, rank: int) -> None:
    """A NaN in the part of one process ends the step in all of them, before anything has changed."""
    params = parameters(mesh, torch.float32, Shard(0))
    optimizer = optim.AdamW8bit(params, lr=LR, error_if_nonfinite=True)
    for bad in (False, True):
        for i, p in enumerate(params):
            p.grad = distribute_tensor(numbers(p.shape, i, torch.float32), mesh, [Shard(0)])
        if not bad:
            optimizer.step()
    before = [p.detach().to_local().clone() for p in params]
    params[1].grad.to_local()[-1:] = torch.nan if rank == 0 else 1.0
    with pytest.raises(FloatingPointError, match="the gradient of parameter 1 of group 0"):
        optimizer.step()
    assert all(torch.equal(p.detach().to_local(), x) for p, x in zip(params, before, strict=True))


def fsdp_graphs(mesh: Any, rank: int) -> None:
    """FSDP2 and torch.compile: parameters and states are those of one process, for several formats in turn, with one
    cache on disk, empty at first and filled then."""
    with tempfile.TemporaryDirectory() as folder, cached(folder):
        hashes, dtype = set(), torch.bfloat16
        for kind in ("adamw8", "adamw_fp8", "adamw4", "adamw8"):
            torch._dynamo.reset()
            module = model(mesh, dtype)[0]
            params = list(module.parameters())
            sharded = KINDS[kind](params, lr=LR, min_numel=MIN_NUMEL)
            own, single = alone(params, kind)
            step = compiled(sharded, "inductor")
            for i in range(2):
                backward(module, dtype, i)
                for p, q in zip(params, own, strict=True):
                    q.grad = p.grad.to_local().clone()
                step()
                single.step()
            assert_same(params, sharded, own, single, (kind, dtype))
            hashes.add(sharded.state[params[0]]["exp_avg"]._stable_hash_for_caching())
        assert len(hashes) == 3  # each format has programs of its own
        assert counters["inductor"]["fxgraph_cache_hit"] >= 1, counters["inductor"]


def dtypes(mesh: Any, rank: int) -> None:
    """A view, a copy or a gathered whole of a bfloat16 state is one too. Were a view's dtype another than its base's,
    torch.compile would ask for base.view(dtype)."""
    for kind in ("adamw8", "adamw_fp8", "adamw4"):
        p = nn.Parameter(distribute_tensor(numbers((64, 256), 0, torch.bfloat16), mesh, [Shard(0)]))
        optimizer = KINDS[kind]([p], lr=LR)
        p.grad = distribute_tensor(numbers(p.shape, 1, torch.bfloat16), mesh, [Shard(0)])
        optimizer.step()
        state = optimizer.state[p]["exp_avg"]
        x: Any = state.to_local()
        n = x.shape[0]
        made = {
            "detach": x.detach(),
            "alias": torch.ops.aten.alias(x),
            "view": x.view(-1),
            "view_as": x.view(x.shape),
            "unflatten": x.view(2, n // 2, 256),
            "slice": x[: n // 2],
            "whole slice": x[:],
            "narrow": x.narrow(0, n // 2, n // 2),
            "split": x.split(n // 2)[1],
            "chunk": x.chunk(2)[1],
            "clone": x.clone(),
            "like": torch.zeros_like(x),
            "empty": torch.empty_like(x),
            "same dtype": x.view(torch.bfloat16),
        }
        placed = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
        wholes = {
            "from_local": placed,
            "detached": state.detach(),
            "replicated": state.redistribute(placements=[Replicate()]),
            "full_tensor": state.full_tensor(),
        }
        for name, y in (made | wholes).items():
            local = y.to_local() if isinstance(y, DTensor) else y
            assert isinstance(local, hop.QuantizedTensor), (kind, name)
            assert y.dtype == local.dtype == local.numbers().dtype == torch.bfloat16, (kind, name, y.dtype)
        for name in ("replicated", "full_tensor"):
            y = wholes[name]
            own = (y.to_local() if isinstance(y, DTensor) else y)[rank * n : (rank + 1) * n]
            assert_bits(own.contiguous(), x, (kind, name))
        for dtype in (torch.float32, torch.float16, torch.uint8):
            with pytest.raises((TypeError, RuntimeError), match="its bits are codes"):
                x.view(dtype)


def cached(folder: str) -> Any:
    """PyTorch's caches of compiled programs on disk, in a folder."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    stack = contextlib.ExitStack()
    stack.enter_context(functorch.patch(enable_autograd_cache=True, strict_autograd_cache=False))
    stack.enter_context(inductor.patch(fx_graph_cache=True))
    return stack


# ---- checkpoints

SAVED = {"adamw8": torch.float32, "adamw4": torch.bfloat16}


def state_of(module: nn.Module, optimizer: Any) -> dict[str, Any]:
    one, other = get_state_dict(module, optimizer)
    return {"model": one, "optimizer": other}


def wide(x: Any) -> Tensor:
    """The numbers of the whole tensor, each process's own quantized part included, in float32."""
    local = x.detach().to_local() if isinstance(x, DTensor) else x.detach()
    local = hop.dequantize(local, torch.float32) if isinstance(local, hop.QuantizedTensor) else local.float()
    if not isinstance(x, DTensor):
        return local
    kept = DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
    return kept.full_tensor()


def numbers_of(module: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    found = {}
    for name, p in module.named_parameters():
        found |= {name: wide(p)} | {f"{name}.{key}": wide(x) for key, x in optimizer.state[p].items()}
    return found


def saved(folder: Path, mesh: Any, rank: int) -> None:
    """Two steps of each kind, as a checkpoint and as whole float tensors."""
    world = 1 if mesh is None else mesh.size()
    for step, (kind, dtype) in enumerate(SAVED.items()):
        module = model(mesh, dtype)
        optimizer = KINDS[kind](module.parameters(), lr=LR, min_numel=MIN_NUMEL)
        for i in range(2):
            backward(module, dtype, i)
            optimizer.step()
        hop.checkpoint.save(state_of(module, optimizer), folder / str(world), step=step)
        whole = numbers_of(module, optimizer)
        if rank == 0:
            torch.save(whole, folder / f"{world}_{kind}.pt")


def loaded(folder: Path, worlds: tuple[int, ...], mesh: Any, rank: int) -> None:
    """What other numbers of processes have saved: the same numbers, quantized in blocks over this process's part; what
    as many have saved: to the bit. Either goes on."""
    for world in worlds:
        for step, (kind, dtype) in enumerate(SAVED.items()):
            whole = torch.load(folder / f"{world}_{kind}.pt", weights_only=True)
            module = model(mesh, dtype)
            optimizer = KINDS[kind](module.parameters(), lr=0.5, min_numel=MIN_NUMEL)
            found = state_of(module, optimizer)
            assert hop.checkpoint.load(found, folder / str(world), step=step) == step
            set_state_dict(module, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
            assert optimizer.param_groups[0]["lr"] == LR
            count = 1 if mesh is None else mesh.size()
            quantized = 0
            for name, p in module.named_parameters():
                assert torch.equal(wide(p), whole[name]), (world, kind, name)
                for key, x in optimizer.state[p].items():
                    local, want = (x.to_local() if isinstance(x, DTensor) else x), whole[f"{name}.{key}"]
                    if not isinstance(local, hop.QuantizedTensor) or world == count:
                        assert torch.equal(wide(x), want), (world, kind, name, key)
                        continue
                    quantized += 1
                    assert x.dtype == dtype
                    own = want if mesh is None else distribute_tensor(want, mesh, [Shard(0)]).to_local()
                    again = hop.quantize(local.quantizer, own)
                    assert torch.equal(local.scale, again.scale), (world, kind, name, key)
                    assert torch.equal(local.codes.view(torch.uint8), again.codes.view(torch.uint8)), (
                        world,
                        kind,
                        name,
                    )
            assert quantized == (0 if world == count else 4)
            backward(module, dtype, 2)
            optimizer.step()


def loaded_and_saved(folder: Path, mesh: Any, rank: int) -> None:
    loaded(folder, (1, 2), mesh, rank)
    saved(folder, mesh, rank)


def basics(mesh: Any, rank: int) -> None:
    eager(mesh, rank)
    near_torch(mesh, rank)
    dtypes(mesh, rank)
    placed_otherwise(mesh, rank)
    nonfinite(mesh, rank)


def in_four(mesh: Any, rank: int) -> None:
    for kind in ("adamw8", "adamw4"):
        trained(mesh, kind, torch.bfloat16, Shard(0))
    fsdp(mesh, rank)


@pytest.mark.full
class TestBasics(unittest.TestCase):
    def test_two(self):
        run(basics, 2)


@pytest.mark.full
class TestProcesses(unittest.TestCase):
    def test_one(self):
        run(eager, 1)

    def test_four(self):
        run(in_four, 4)

    def test_graphs(self):
        run(graphs, 2)

    @pytest.mark.compiler
    def test_fsdp_graphs(self):
        run(fsdp_graphs, 2)

    def test_checkpoints(self):
        """Written by 1, 2 and 4 processes, read by 1, 2 and 4."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            saved(folder, None, 0)
            run(functools.partial(saved, folder), 2)
            run(functools.partial(loaded_and_saved, folder), 4)
            run(functools.partial(loaded, folder, (1, 2, 4)), 2)
            loaded(folder, (1, 2, 4), None, 0)
