"""Judges of GPU kernels: right kernels pass, in the emulator where the compiler is installed, and wrong ones do not."""

import itertools
import unittest
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch import Tensor

import cutlass_kernels
from benchmarks import gpu_quantize, gpu_steps
from cutlass_kernels import forms, hopper, nibbles, registry, transposing, trial_products, trust
from cutlass_kernels.trials import Judged
from hop.impls.scaled import trials as of_quantize
from hop.kernels.gpu import step as gpu_step
from hop.optim import trials as of_steps
from tests.support.contexts import enter

needs_dsl = pytest.mark.skipif(cutlass_kernels.missing() is not None, reason=str(cutlass_kernels.missing()))
CPU = torch.device("cpu")
E4M3, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


def first(judged: Judged, count: int = 1) -> None:
    """Run the first checks of a judge."""
    checks = list(itertools.islice(judged.checks, count))
    assert len(checks) == count
    for check in checks:
        check()


def quantizing() -> dict[str, Any]:
    """The kernels that benchmarks quantize with, by name."""
    cases = (*gpu_quantize.checked(), *gpu_quantize.timings_of())
    return {v.name: v for case in cases for v in case.variants()}


def of_each_type(kernels: dict[str, Any]) -> list[tuple[str, Any]]:
    found: dict[Any, Any] = {}
    for v in kernels.values():
        key = (type(v), getattr(v, "operation", ""), getattr(v, "square", False), getattr(v, "straight", False))
        found.setdefault(key, v)
    return [(v.name, v) for v in found.values()]


class TestQuantizing(unittest.TestCase):
    def test_each_kernel_has_checks(self) -> None:
        """On tensors for which the library chooses it."""
        for name, v in quantizing().items():
            assert next(iter(of_quantize.quantizing(v, CPU).checks), None) is not None, name
            assert trust.judge_of(v) == "hop.impls.scaled.trials:quantizing"

    @parameterized.expand(of_each_type(quantizing()))
    @needs_dsl
    @pytest.mark.full
    def test_right_kernels_pass(self, _: str, v: Any) -> None:
        from tests.support import emulated_quantize

        with emulated_quantize.here():
            first(of_quantize.quantizing(v, CPU))

    @needs_dsl
    @pytest.mark.full
    def test_a_wrong_bit_is_seen(self) -> None:
        from tests.support import emulated_quantize

        kernels = quantizing()
        for name, place in (("quantize_bf16_s8_amax", 1), ("dequantize_s8_bf16", 0), ("largest_bf16", 1)):
            with emulated_quantize.here():
                for module in (of_quantize.quantize, of_quantize.dequantize):
                    spoilt = wrong(module.compiled, place)
                    enter(self, mock.patch.object(module, "compiled", spoilt))
                with self.assertRaisesRegex(AssertionError, "elements .*differ"):
                    first(of_quantize.quantizing(kernels[name], CPU))


def wrong(compiled: Callable[[Any], Any], place: int) -> Callable[[Any], Any]:
    """Kernels that change one bit of an argument after all."""

    def made(v: Any) -> Any:
        kernel = compiled(v)

        def run(*arguments: Any) -> None:
            kernel(*arguments)
            written = arguments[place]
            written.reshape(-1)[:1].view(torch.uint8)[0] ^= 1

        return run

    return made


class TestSteps(unittest.TestCase):
    @parameterized.expand([("adamw8", BF16), ("stochastic", BF16), ("lion", F32)])
    @needs_dsl
    @pytest.mark.full
    def test_right_kernels_pass_and_wrong_ones_do_not(self, kind: str, dtype: torch.dtype) -> None:
        from tests.support import emulated_steps

        subject = gpu_steps.subject_of(kind, dtype, "sm_90a")
        assert trust.judge_of(gpu_step.kernel_of(subject).update) == "hop.optim.trials:updating"
        with emulated_steps.on_gpu():
            first(of_steps.updating(subject, CPU), 2)
            own = gpu_step.steps.run

            def spoilt(step: Any, parameters: Any, *rest: Any) -> None:
                own(step, parameters, *rest)
                parameters[0].p.view(-1)[:1].view(torch.uint8)[0] ^= 1

            with mock.patch.object(gpu_step.steps, "run", spoilt), self.assertRaisesRegex(AssertionError, "parameter"):
                first(of_steps.updating(subject, CPU))


class TestProducts(unittest.TestCase):
    @needs_dsl
    @pytest.mark.full
    def test_emulated_products_pass(self) -> None:
        from tests.support import emulated

        with mock.patch.object(hopper, "compiled", lambda v: emulated.compiled(v).host):
            for form in (forms.MAIN[0], forms.MAIN[4]):
                v = replace(form, tile=trial_products.hopper.tiles.SMALLEST, tma=False)
                first(trial_products.product(v, CPU), 6)

    @needs_dsl
    @pytest.mark.full
    def test_emulated_nibbles_pass_and_wrong_ones_do_not(self) -> None:
        from tests.support import emulated

        v = next(v for v in forms.variants() if v.group == 32 and v.lhs == torch.int8 and v.tile.n == 8)
        with mock.patch.object(nibbles, "compiled", lambda v: emulated.compiled(v).host):
            first(trial_products.product(v, CPU), 3)
            spoilt = wrong(nibbles.compiled, 4)
            with mock.patch.object(nibbles, "compiled", spoilt), self.assertRaisesRegex(AssertionError, "bytes differ"):
                first(trial_products.product(v, CPU))

    def test_transposed_bytes(self) -> None:
        def kernel(source: Tensor, target: Tensor) -> None:
            rows, k = (source.view(torch.uint8).mT, source.shape[1])
            target.zero_().view(torch.uint8)[..., :k] = rows

        spoilt = wrong(lambda _: kernel, 1)(None)
        for run, is_right in ((kernel, True), (spoilt, False)):
            with mock.patch.object(transposing, "compiled", lambda _=None, run=run: run):
                judged = trial_products.transposition(transposing.KERNEL, CPU)
                if is_right:
                    first(judged, 4)
                else:
                    with self.assertRaisesRegex(AssertionError, "bytes differ"):
                        first(judged)


def launched(kernel: Any, call: registry.Call, stream: int) -> None:
    """What a kernel of NVIDIA's registry computes, in plain torch; `kernel` is the error of each element."""
    total = call.lhs.double() @ call.rhs.double()
    if call.case.scaled:
        total *= call.vectors[0].double() * call.vectors[1].double()
    if call.case.biased:
        total += call.vectors[-1].double()
    call.out.copy_((total + kernel).to(call.out.dtype))


CASES = (
    ("s8", registry.Case(torch.int8, torch.int8, torch.int32, tile=(64, 64))),
    ("batch", registry.Case(torch.uint8, torch.uint8, torch.int32, batched=True)),
    ("e4m3", registry.Case(E4M3, E4M3, BF16, scaled=True, biased=True)),
    ("pair", registry.Case(E4M3, E4M3, F32, tile=(256, 256), pair=True)),
)


class TestRegistry(unittest.TestCase):
    @parameterized.expand(CASES)
    @pytest.mark.quick(2)
    def test_right_kernels_pass_and_wrong_ones_do_not(self, _: str, case: registry.Case) -> None:
        kernel = registry.Registered(case, "sm_100a", 148 if not case.pair else 8)
        with mock.patch.object(registry, "launch", launched), mock.patch("torch.cuda.current_stream"):
            for error in (0.0, 1e3):
                with mock.patch.object(registry, "compiled", lambda _, error=error: error):
                    judged = trial_products.registry_product(kernel, CPU)
                    if not error:
                        first(judged)
                    else:
                        with self.assertRaisesRegex(AssertionError, "differ|are wrong"):
                            first(judged)

    def test_scales_of_groups(self) -> None:
        for lhs, scale in ((E4M3, 32), (torch.float4_e2m1fn_x2, 16), (torch.float4_e2m1fn_x2, 32)):
            case = registry.tiled(registry.Case(lhs, lhs, BF16, group=scale), 64, 64, 148)
            kernel = registry.Registered(case, "sm_100a", 148)
            products = list(trial_products._products(kernel, CPU))
            assert products and all(registry.kernel_of(p, 148, "sm_100a") == kernel for p in products)
            wanted = iter([a.double() @ b.double() for a, b in map(dequantized, products)])

            def launch(error: float, call: registry.Call, stream: int, wanted: Any = wanted) -> None:
                y = next(wanted)
                call.out[: y.shape[0], : y.shape[1]] = (y * (1 + error)).to(call.out.dtype)

            with mock.patch.object(registry, "launch", launch), mock.patch("torch.cuda.current_stream"):
                for error in (0.0, 0.1):
                    with mock.patch.object(registry, "compiled", lambda _, error=error: error):
                        judged = trial_products.registry_product(kernel, CPU)
                        if not error:
                            first(judged)
                        else:
                            with self.assertRaisesRegex(AssertionError, "are wrong"):
                                first(trial_products.Judged(judged.compile, itertools.islice(judged.checks, 1, None)))


def dequantized(p: Any) -> tuple[Tensor, Tensor]:
    from cutlass_kernels import plain

    return plain.dequantized(p, F32)
