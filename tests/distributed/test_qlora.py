"""QLoRA under FSDP2: a frozen base of 4 bits, adapters in bfloat16, AdamW8bit; the losses are those of one process.

The loss of a step may differ from that of one process by 2^-8 of it, one unit in the last place of bfloat16: each
process rounds the gradients of its part of the batch to bfloat16 before they are averaged, the logits are bfloat16,
and blocks of the optimizer's 8-bit states end where a shard ends.
"""

import functools
import importlib.util
import tempfile
import unittest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parameterized import parameterized
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import hop
import hop.checkpoint
import hop.optim
from tests.support.processes import run

BOUND = 2**-8
SCHEMES = {"int4": "int4", "nvfp4": "nvfp4_weight"}  # both quantize weights alone
ROWS, WIDTH, CLASSES, STEPS = 16, 64, 32, 8


class Adapted(torch.nn.Module):
    """A frozen layer with an adapter of rank 8."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        outputs, inputs = base.weight.shape
        self.down = torch.nn.Parameter(torch.randn(8, inputs, dtype=torch.bfloat16) / inputs**0.5)
        self.up = torch.nn.Parameter(torch.zeros(outputs, 8, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.down.T) @ self.up.T


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.wide, self.narrow = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x))))


def floats() -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(WIDTH, CLASSES))
    return model.bfloat16().requires_grad_(False)


def adapted(scheme: Any) -> torch.nn.Sequential:
    model = hop.quantize_(floats(), scheme, pack=False)
    torch.manual_seed(1)
    for block in model[:2]:
        block.wide, block.narrow = Adapted(block.wide), Adapted(block.narrow)
    return model


def sharded(model: Any, mesh: Any) -> Any:
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def optimizer_of(model: Any) -> Any:
    return hop.optim.AdamW8bit([p for p in model.parameters() if p.requires_grad], lr=1e-2, min_numel=0)


def train(model: Any, optimizer: Any, steps: range, processes: int = 1, rank: int = 0) -> list[float]:
    """The losses of steps, each on this process's part of the batch and averaged."""
    found = []
    for step in steps:
        drawn = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, WIDTH, generator=drawn).bfloat16()
        labels = torch.randint(CLASSES, (ROWS,), generator=drawn)
        rows = slice(rank * ROWS // processes, (rank + 1) * ROWS // processes)
        loss = torch.nn.functional.cross_entropy(model(x[rows]).float(), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(averaged(loss, processes))
    return found


def averaged(loss: Tensor, processes: int) -> float:
    loss = loss.detach()
    if processes > 1:
        dist.all_reduce(loss)
    return loss.item() / processes


def assert_close(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert abs(a - b) <= BOUND * b, (found, expected)


# ---- what runs in each process


def trains(mesh: Any, rank: int, schemes: tuple[str, ...] = tuple(SCHEMES)) -> None:
    """The base keeps its codes, and only the adapters change."""
    for name in schemes:
        one, many = adapted(SCHEMES[name]), sharded(adapted(SCHEMES[name]), mesh)
        expected = train(one, optimizer_of(one), range(STEPS))
        before = [p.to_local().codes.clone() for p in many.parameters() if is_quantized(p)]
        assert_close(train(many, optimizer_of(many), range(STEPS), mesh.size(), rank), expected)
        after = [p.to_local().codes for p in many.parameters() if is_quantized(p)]
        assert len(before) == 5 and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        changed = [n for n, p in many.named_parameters() if p.grad is not None]
        assert len(changed) == 8 and all(n.endswith((".up", ".down")) for n in changed)


def is_quantized(p: Any) -> bool:
    return isinstance(p.to_local(), hop.QuantizedTensor)


def resumes(mesh: Any, rank: int, folder: str = "") -> None:
    """Saved half way and loaded into new objects, training goes on with the same losses to the bit."""
    for name, scheme in SCHEMES.items():
        model = sharded(adapted(scheme), mesh)
        optimizer = optimizer_of(model)
        train(model, optimizer, range(4), mesh.size(), rank)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        hop.checkpoint.save(state, f"{folder}/{name}", step=4)
        expected = train(model, optimizer, range(4, STEPS), mesh.size(), rank)
        assert_close(continued(name, mesh, rank, folder), expected)
        assert continued(name, mesh, rank, folder) == expected


def continued(name: str, mesh: Any, rank: int, folder: str) -> list[float]:
    """The losses of the second half, from the files of the first."""
    other = sharded(adapted(SCHEMES[name]), mesh)
    optimizer = optimizer_of(other)
    state = dict(zip(("model", "optimizer"), get_state_dict(other, optimizer), strict=True))
    assert hop.checkpoint.load(state, f"{folder}/{name}") == 4
    set_state_dict(other, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return train(other, optimizer, range(4, STEPS), mesh.size(), rank)


def resumes_with_others(mesh: Any, rank: int, folder: str = "") -> None:
    """Files of another number of processes go on within the bound."""
    for name, scheme in SCHEMES.items():
        one = adapted(scheme)
        expected = train(one, optimizer_of(one), range(STEPS))[4:]
        assert_close(continued(name, mesh, rank, folder), expected)


def quantized_after(mesh: Any, rank: int) -> None:
    """FSDP2 keeps the Parameters that it has sharded, so quantizing them later is refused, and nothing changes."""
    changes = {
        "quantize_": lambda model: hop.quantize_(model, "int4", pack=False),
        "convert": lambda model: hop.nn.convert(model, "int4"),
        "freeze": lambda model: hop.nn.freeze(model),
    }
    for name, change in changes.items():
        model = sharded(hop.nn.convert(floats(), "int4") if name == "freeze" else floats(), mesh)
        types = [type(m) for m in model.modules()]
        with pytest.raises(ValueError, match=r"'0\.wide'.*fully_shard.*before fully_shard"):
            change(model)
        assert [type(m) for m in model.modules()] == types
        model(torch.randn(4, WIDTH).bfloat16())


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    return LlamaForCausalLM(config).bfloat16()


def with_peft(mesh: Any, rank: int) -> None:
    """LoRA of PEFT on a Llama, each decoder layer a group."""
    from peft import LoraConfig, get_peft_model

    found = []
    for shards in (False, True):
        model = hop.quantize_(llama(), "int4", filter="*.layers.*", pack=False)
        torch.manual_seed(1)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
        model: Any = get_peft_model(model, lora, autocast_adapter_dtype=False)
        if shards:
            for layer in model.get_base_model().model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer, processes = optimizer_of(model), mesh.size() if shards else 1
        losses = []
        for step in range(STEPS):
            ids = torch.randint(1, 64, (4, 12), generator=torch.Generator().manual_seed(step % 2))
            mine = ids[rank * 4 // processes : (rank + 1) * 4 // processes] if shards else ids
            loss = model(input_ids=mine, labels=mine).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(averaged(loss, processes))
        found.append(losses)
    assert_close(found[1], found[0])
    assert found[1][-1] < found[1][0]


class TestQuick(unittest.TestCase):
    def test_trains(self):
        run(functools.partial(trains, schemes=("int4",)), 2)


@pytest.mark.full
class TestProcesses(unittest.TestCase):
    @parameterized.expand([(1,), (2,), (4,)])
    def test_trains(self, processes: int):
        run(trains, processes)

    def test_resumes(self):
        with tempfile.TemporaryDirectory() as folder:
            for processes in (2, 4):
                own = f"{folder}/{processes}"
                run(functools.partial(resumes, folder=own), processes)
                run(functools.partial(resumes_with_others, folder=own), 6 - processes)

    def test_quantized_after(self):
        run(quantized_after, 2)

    @pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
    def test_peft(self):
        run(with_peft, 2)
