"""The kernels of optimizers without a GPU: they compile for each target, and in the emulator of tests.ptx a step has
the bits of the CPU's native one."""

import contextlib
import functools
import unittest
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch import nn

import cutlass_kernels
from benchmarks import gpu_steps
from benchmarks.gpu_steps import BF16, F16, F32, OPTIMIZERS, compare, counted, drawn, give_gradients
from cutlass_kernels import steps, updates
from cutlass_kernels.updates import Update
from hop import optim, presets
from hop.dispatch.kernel import Declined
from hop.kernels.cpu import native
from hop.kernels.gpu import step as gpu
from hop.numerics.quantizer import Quantizer

if reason := cutlass_kernels.missing():
    pytest.skip(reason, allow_module_level=True)

from tests.ptx import HABITS, contractable, habits
from tests.support import cubin, emulated_steps


class TestCompile(unittest.TestCase):
    @parameterized.expand([(u.name[:60], u) for u in gpu_steps.updates()])
    @pytest.mark.sampled(16)
    @pytest.mark.full
    def test_instructions_and_registers(self, _, update):
        made = emulated_steps.compiled(update)
        assert contractable(made.ptx) == [] and ".ftz" not in made.ptx
        words = {line.split()[0] for line in made.ptx.split("\n") if line.startswith("\t")}
        assert not [w for w in words if w.startswith(("div.", "sqrt.", "rcp.")) and ".rn.f32" not in w]
        used = cubin.usage(made.cubin)
        assert used.stack_bytes == 0, f"{used.stack_bytes} bytes of registers are spilled"
        assert used.registers * updates.WARPS * updates.WARP <= 65536

    @parameterized.expand([(target,) for target in updates.TARGETS.values()])
    @pytest.mark.sampled(9)
    @pytest.mark.full
    def test_each_target(self, target):
        for kind in ("adamw8", "adamw_fp8"):
            with mock.patch.object(updates, "WITHOUT_FLOAT8", ()):
                _, update, _ = gpu_steps.kernels_of(kind, BF16, target)
            if update.declines() is None:
                steps.build(update)
            else:
                assert kind == "adamw_fp8" and target in ("sm_80", "sm_86")


class TestEmulated(unittest.TestCase):
    def setUp(self):
        if (why := native.declines_here()) is not None:
            self.skipTest(why)

    def compare(self, kind, dtype, nasty, **options):
        around = functools.partial(emulated_steps.on_gpu, **options)
        compare(kind, dtype, nasty=nasty, device="cpu", around=around)

    @pytest.mark.full
    def test_a_step_has_the_bits_of_the_cpu(self):
        self.compare("adamw8", BF16, nasty=True)

    @parameterized.expand([(f"{k}_{d}".replace("torch.", ""), k, d) for k in OPTIMIZERS for d in (F32, BF16, F16)])
    @pytest.mark.sampled(9)
    @pytest.mark.full
    def test_each_optimizer(self, _, kind, dtype):
        for nasty in (False, True):
            self.compare(kind, dtype, nasty)

    def at_thresholds(self, q: Quantizer) -> list[Update]:
        """The first step of SGD, whose momentum is the gradient: numbers at the thresholds of a format, and beside
        them, in blocks with a scale of 1."""
        f: Any = q.format
        at = torch.tensor([t for t in f._thresholds if abs(t) <= f.max])
        (block,) = q.block
        near = torch.cat([at, at.nextafter(torch.tensor(torch.inf)), at.nextafter(torch.tensor(-torch.inf)), -at])
        near = near[near.abs() <= f.max]
        rows = near.new_full((-(-len(near) // (block - 1)), block), f.max)
        rows[:, 1:] = torch.nn.functional.pad(near, (0, -len(near) % (block - 1))).reshape(len(rows), -1)
        results, kernels = [], []
        for around in (contextlib.nullcontext, emulated_steps.on_gpu):
            p = nn.Parameter(torch.zeros(rows.numel()))
            p.grad = rows.flatten()
            optimizer = optim.SGD([p], lr=1e-3, momentum=0.9, state=q, min_numel=0)
            with around(), counted() as seen:
                optimizer.step()
            results.append(optimizer.state[p]["momentum_buffer"])
            kernels += seen
        assert (results[0].scale == 1).all()
        gpu_steps.assert_same(*results, str(q))
        return kernels

    @parameterized.expand(
        ["STATE8", "STATE8_UNSIGNED", "STATE4", "STATE4_UNSIGNED", "STATE4_UNSIGNED_ZERO", "STATE_FP8"]
    )
    @pytest.mark.sampled(3)
    @pytest.mark.full
    def test_thresholds(self, name):
        assert len(self.at_thresholds(getattr(presets, name))) == 1

    @pytest.mark.full
    def test_wrong_kernels_are_seen(self):
        """One instruction is another, or flushes subnormals."""

        def lion() -> None:
            compare("lion", F32, nasty=True, shapes=((40, 512),), device="cpu", around=emulated_steps.on_gpu)

        ties = functools.partial(self.at_thresholds, presets.STATE8)
        own = emulated_steps.compiled
        for old, new, run in (
            ("sub.rn.f32", "add.rn.f32", lion),
            ("mul.rn.f32", "mul.rn.ftz.f32", lion),
            ("setp.ge.f32", "setp.gt.f32", ties),
        ):

            def wrong(update: Update, old: str = old, new: str = new) -> Any:
                right = own(update)
                return mock.Mock(host=right.host.with_ptx(right.ptx.replace(old, new)))

            with (
                self.subTest(new),
                mock.patch.object(emulated_steps, "compiled", functools.cache(wrong)),
                pytest.raises(AssertionError, match="have other bits"),
            ):
                run()

    @parameterized.expand(list(HABITS))
    @pytest.mark.sampled(8)
    @pytest.mark.full
    def test_each_habit(self, name):
        self.compare("stochastic", BF16, True, habits=habits(name), multiprocessors=3)

    @pytest.mark.full
    def test_other_places_in_memory(self):
        """Parameters that are no multiples of 16 bytes away, and that do not lie row by row."""
        wide = [p.detach() for p in drawn(((6001,), (64, 100)), BF16)]
        params = [nn.Parameter(wide[0][1:]), nn.Parameter(wide[1].clone().mT)]
        others = [nn.Parameter(wide[0].clone()[1:]), nn.Parameter(wide[1].clone().mT)]
        ours, theirs = (OPTIMIZERS["adamw8"](p) for p in (params, others))
        for i in range(2):
            give_gradients(params, i)
            for p, other in zip(params, others, strict=True):
                assert p.grad is not None
                other.grad = p.grad.clone()
            ours.step()
            with emulated_steps.on_gpu(), counted() as seen:
                theirs.step()
            assert len(seen) == 1
            for p, other in zip(params, others, strict=True):
                gpu_steps.assert_same(p, other, "a parameter")
                for name, state in ours.state[p].items():
                    gpu_steps.assert_same(state, theirs.state[other][name], name)


class TestLaunches(unittest.TestCase):
    """What is launched, without a kernel."""

    def stepped(self, optimizer, params, new=True):
        """The kernels of a step, and what they are called with."""
        launched: list[tuple] = []
        if new:
            give_gradients(params, 0)
        kernel = mock.MagicMock(side_effect=lambda *call: launched.append(call))
        with (
            emulated_steps.on_gpu(),
            counted() as seen,
            mock.patch.object(emulated_steps, "compiled", lambda update: mock.Mock(host=kernel)),
        ):
            optimizer.step()
        return seen, launched

    def test_one_for_all_parameters_of_a_group(self):
        params = drawn(((64, 100), (5,), (8192,), (3, 7)), BF16)
        optimizer = optim.AdamW8bit([{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0}])
        seen, launched = self.stepped(optimizer, params)
        assert [len(u.kinds) for u in seen] == [2, 1]
        assert [call[0].shape[0] - 1 for call in launched] == [3, 1]
        assert [call[5] for call in launched] == [7 + 1 + 8, 1]

    def test_one_for_each_count_of_steps(self):
        params = drawn(((64, 100), (8192,)), BF16)
        optimizer = optim.AdamW8bit(params)
        self.stepped(optimizer, params)
        optimizer.state[params[0]]["step"] += 3
        seen, launched = self.stepped(optimizer, params)
        assert len(seen) == 2 and launched[0][2] != launched[1][2]

    def test_records_stay_while_nothing_moves(self):
        params = drawn(((64, 100), (8192,)), BF16)
        optimizer = optim.AdamW8bit(params)
        _, (first,) = self.stepped(optimizer, params)
        _, (second,) = self.stepped(optimizer, params, new=False)
        held = [p.grad for p in params]  # so that others lie elsewhere
        _, (third,) = self.stepped(optimizer, params)
        assert first[0] is second[0] and third[0] is not second[0]
        for call, grads in ((second, held), (third, [p.grad for p in params])):
            assert call[0][:-1, updates.P + 1].tolist() == [g.data_ptr() for g in grads]

    def test_kinds_one_by_one_where_their_kernel_was_not_built(self):
        params = drawn(((64, 100), (5,)), BF16)
        declines = lambda update: "not built" if len(update.kinds) > 1 else None  # noqa: E731
        with mock.patch.object(steps, "declines", declines):
            seen, launched = self.stepped(optim.AdamW8bit(params), params)
        assert [len(u.kinds) for u in seen] == [1, 1] and len(launched) == 2

    def test_captured_steps_are_refused_before_anything_changes(self):
        params = drawn(((64, 100),), BF16)
        optimizer = optim.AdamW8bit(params)
        give_gradients(params, 0)
        optimizer.step()
        before = params[0].detach().clone()
        with (
            mock.patch.object(torch.cuda, "is_available", lambda: True),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
            pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"),
        ):
            optimizer.step()
        assert torch.equal(before, params[0]) and optimizer.state[params[0]]["step"] == 1

    def test_what_no_kernel_takes_goes_another_way(self):
        params = drawn(((64, 100),), torch.float64)
        with emulated_steps.on_gpu(), counted() as seen, native.use("off"):
            give_gradients(params, 0)
            optim.AdamW8bit(params).step()
        assert seen == []
        q = replace(optim.BITS8["exp_avg"], block=(1024,))  # type: ignore[type-var]
        with self.assertRaisesRegex(Declined, "at most 256"):
            gpu._described(str(q), 0.0)
