"""Train on several processes under FSDP2, gathering weights as codes, and on a single process; compare.

torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node 2 examples/distributed.py
    [--task digits|minilm|all] [--steps N] [--output FILE.json]

The tasks are the digits of digits.py and the sentences of finetune_minilm.py. For each scheme, two copies of a model
train from the same start over the same batches: one under FSDP2, each process with its part of a batch, and one on each
process alone, with the whole batch. Halfway, the state of the digits task is saved to a checkpoint, from which a new
model continues.

No scheme uses stochastic rounding, because random numbers for a part of a batch differ from those for the whole.
FP8_HYBRID has one scale per tensor, which for inputs and gradients means one per part; it trains alike, but not bit for
bit.

Exits with code 1 if a claim in docs/distributed.md does not hold.
"""

import argparse
import copy
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import json_rows, require
from tasks import TASKS, Batch, Task
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import hop
import hop.checkpoint

EXACT = ("digits", "INT8_STATIC")  # all layers sum integers, with the same scales for a part of a batch
CLIP = 1.0  # gradients are clipped to this norm
# Tolerances for the losses and parameters of float32 against a single process. In low precision, last bits change codes
# of activations, so that trainings diverge; there, only the mean loss is compared.
BOUND, ALLOWED = 1e-3, 0.05
STEPS = {"digits": 60, "minilm": 12}
PART = 0.5  # most gathered bytes relative to float32

# ---- models and their training


def built(task: Task, scheme: hop.Scheme | None, calibrate: bool = True) -> nn.Module:
    """A copy of the task's initial model in a scheme."""
    model = copy.deepcopy(task.start).train()
    if scheme is not None:
        hop.nn.convert(model.get_submodule(task.body), [(nn.Linear, scheme), (nn.Conv2d, scheme)])
    if calibrate and any(isinstance(module, hop.nn.StaticScale) for module in model.modules()):
        hop.nn.calibrate(model, [inputs for inputs, _ in task.batches[:8]], progress=False)
    return model


def sharded(model: nn.Module, task: Task, mesh: Any) -> nn.Module:
    """The model under FSDP2. Frozen parameters stay whole on each process."""
    hop.nn.gather_as_codes(model)
    frozen = {p for p in model.parameters() if not p.requires_grad}
    for name in task.groups:
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=frozen)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    """Run one training step; returns its loss."""
    inputs, labels = batch
    loss = functional.cross_entropy(model(*inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return loss.detach()


def own(batch: Batch) -> Batch:
    """This process's part of a batch. All parts have the same length, so that the mean of their losses is that of the
    batch.
    """
    rank, count = dist.get_rank(), dist.get_world_size()
    inputs, labels = batch
    require(len(labels) % count == 0, f"a batch of {len(labels)} has no equal parts for {count} processes")
    return tuple(x.chunk(count)[rank] for x in inputs), labels.chunk(count)[rank]


def combined(x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    dist.all_reduce(x, op)
    return x / dist.get_world_size() if op == dist.ReduceOp.SUM else x


class Sent(TorchDispatchMode):
    """Counts the bytes that this process passes to FSDP2's collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered = self.reduced = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.c10d._allgather_base_.default:
            self.gathered += args[1].nbytes
        elif op is torch.ops.c10d._reduce_scatter_base_.default:
            self.reduced += args[1].nbytes
        return op(*args, **(kwargs or {}))


def described(model: nn.Module, task: Task) -> int:
    """The expected bytes that all processes send to gather the parameters of a step.

    Parameters of groups are gathered in the forward and again in the backward, others once. For floats, every process
    sends the same number of rows.
    """
    count, total = dist.get_world_size(), 0
    for name, module in model.named_modules():
        times = 2 if any(f"{name}.".startswith(f"{group}.") for group in task.groups) else 1
        for key, p in module.named_parameters(recurse=False):
            if key == "weight" and isinstance(module, hop.nn.Layer):
                total += times * hop.nn.bytes_gathered(module, count)
            elif p.requires_grad:
                total += times * -(-len(p) // count) * count * p[0].numel() * p.element_size()
    return total


# ---- the comparison


class Run:
    """The two trainings in one scheme."""

    def __init__(self, task: Task, scheme: hop.Scheme | None, mesh: Any) -> None:
        self.task, self.scheme, self.mesh = task, scheme, mesh
        self.alone, self.together = built(task, scheme), sharded(built(task, scheme), task, mesh)
        self.optimizers = [task.optimizer(model) for model in (self.alone, self.together)]
        self.losses: list[tuple[float, float]] = []  # single process, several processes

    def first_logits(self) -> float:
        """The largest difference between the logits of the parts and of the whole batch."""
        batch = self.task.batches[0]
        with torch.no_grad():
            mine = self.alone(*batch[0]).chunk(dist.get_world_size())[dist.get_rank()]
            difference = (self.together(*own(batch)[0]) - mine).abs().max()
        return combined(difference, dist.ReduceOp.MAX).item()

    def sent(self) -> Sent:
        """The bytes of a step, measured in a forward and backward without an update.

        This is not a training step, because inside a dispatch mode operators use other routes, which may sum in another
        order.
        """
        inputs, labels = own(self.task.batches[0])
        with Sent() as sent:
            functional.cross_entropy(self.together(*inputs), labels).backward()
        self.together.zero_grad()
        return sent

    def train(self, folder: str) -> None:
        """Run all steps; halfway, save a checkpoint in `folder`."""
        count = len(self.task.batches)
        for number, batch in enumerate(self.task.batches):
            if number == count // 2 and self.task.name == "digits":
                hop.checkpoint.save(state(self.together, self.optimizers[1]), folder, step=number)
            alone = step(self.alone, self.optimizers[0], batch)
            together = step(self.together, self.optimizers[1], own(batch))
            self.losses.append((alone.item(), combined(together, dist.ReduceOp.SUM).item()))

    def resumed_alike(self, folder: str) -> bool:
        """Whether a model that loads the checkpoint, without other calibration, continues with the same losses."""
        model = sharded(built(self.task, self.scheme, calibrate=False), self.task, self.mesh)
        optimizer = self.task.optimizer(model)
        found = state(model, optimizer)
        begin = hop.checkpoint.load(found, folder)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        losses = [combined(step(model, optimizer, own(b)), dist.ReduceOp.SUM).item() for b in self.task.batches[begin:]]
        return losses == [together for _, together in self.losses[begin:]]

    def parameters_differ(self) -> float:
        """The norm of the difference of all trained parameters, relative to their norm."""
        trained = [p for p in self.together.parameters() if p.requires_grad]
        several = torch.cat([p.full_tensor().detach().flatten() for p in trained])  # type: ignore[attr-defined]
        alone = torch.cat([p.detach().flatten() for p in self.alone.parameters() if p.requires_grad])
        return ((several - alone).norm() / alone.norm()).item()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        inputs, labels = self.task.held_out
        pieces = zip(*(x.split(64) for x in inputs), strict=True)
        with torch.no_grad():
            logits = torch.cat([model(*piece) for piece in pieces])
        right = 100 * (logits.argmax(1) == labels).double().mean().item()
        return {"loss": functional.cross_entropy(logits, labels).item(), "accuracy": right}


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def compare(task: Task, mesh: Any, folder: str) -> dict[str, Any]:
    """The measurements of each scheme."""
    found = {}
    for name, scheme in task.schemes.items():
        run, start = Run(task, scheme, mesh), time.perf_counter()
        sent, logits = run.sent(), run.first_logits()
        run.train(f"{folder}/{name}")
        found[name] = {
            "first_logits_differ": logits,
            "losses_differ": max(abs(b / a - 1) for a, b in run.losses),
            "parameters_differ": run.parameters_differ(),
            "alone": run.evaluate(run.alone),
            "together": run.evaluate(run.together),
            "gathered_bytes": sent.gathered * dist.get_world_size(),
            "described_bytes": described(run.together, task),
            "reduced_bytes": sent.reduced,
            "losses": [[round(x, 4) for x in pair] for pair in run.losses],
        }
        if task.name == "digits":
            found[name]["resumed_alike"] = run.resumed_alike(f"{folder}/{name}")
        if dist.get_rank() == 0:
            print(line(f"{task.name} {name}", found[name], time.perf_counter() - start), flush=True)
    return found


HEADER = f"{'':21}{'logits':>9}{'losses':>9}{'weights':>9}{'held-out loss':>16}{'MB gathered':>13}{'seconds':>9}"


def line(name: str, row: dict[str, Any], seconds: float) -> str:
    differ = "".join(f"{row[f'{key}_differ']:9.1e}" for key in ("first_logits", "losses", "parameters"))
    held_out = f"{row['alone']['loss']:.4f} {row['together']['loss']:.4f}"
    return f"{name:21}{differ}{held_out:>16}{row['gathered_bytes'] / 1e6:13.4g}{seconds:9.0f}"


def check(task: str, found: dict[str, Any]) -> None:
    """Exit unless all claims hold."""
    for name, row in found.items():
        label = f"{task}, {name}"
        sent, said = row["gathered_bytes"], row["described_bytes"]
        require(sent == said, f"{label}: {sent} bytes were gathered in a step, and {said} described")
        if (task, name) == EXACT:
            off = row["first_logits_differ"]
            require(off == 0, f"{label}: the first logits of parts differ from those of the whole batch by {off}")
        for key in ("losses", "parameters") if name == "float32" else ():
            off = row[f"{key}_differ"]
            require(off <= BOUND, f"{label}: {key} differ from those of one process by {off:.2g}, over {BOUND}")
        alone, together = (statistics.mean(losses) for losses in zip(*row["losses"], strict=True))
        off = together / alone - 1
        require(abs(off) <= ALLOWED, f"{label}: the mean loss differs from that of one process by {off:+.1%}")
        require(row.get("resumed_alike", True), f"{label}: training from the checkpoint went on with other losses")
        part = sent / found["float32"]["gathered_bytes"]
        require(name == "float32" or part < PART, f"{label}: {part:.2f} of the bytes of float32 were gathered")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=(*TASKS, "all"), default="all")
    parser.add_argument("--steps", type=int, help="of training in each scheme (digits: 60, minilm: 12)")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        print("one process: there is nothing to compare; start several with torchrun --nproc_per_node 2")
        return
    torch.set_num_threads(1)
    dist.init_process_group(hop.distributed.gloo())
    count = dist.get_world_size()
    mesh, start = init_device_mesh("cpu", (count,)), time.perf_counter()
    if dist.get_rank() == 0:
        print(f"{count} processes; differences from one process:\n{HEADER}")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as own_folder:
        shared = [own_folder]
        dist.broadcast_object_list(shared)  # use the first process's folder
        for name in TASKS if args.task == "all" else [args.task]:
            found[name] = compare(TASKS[name](args.steps or STEPS[name]), mesh, f"{shared[0]}/{name}")
        dist.barrier()
    if dist.get_rank() == 0 and args.output is not None:
        content = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "processes": count,
            "seconds": time.perf_counter() - start,
            "tasks": found,
        }
        args.output.write_text(json_rows(content) + "\n")
    dist.destroy_process_group()
    for name, rows in found.items():
        check(name, rows)
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads may abort the process at shutdown (pytorch #179291)


if __name__ == "__main__":
    main()
