"""Each scheme of quantize_ on GPUs by PyTorch's own operators: programs traced with tensors that have no data.

A layer is quantized and lowered as Inductor does it, as on a GPU without kernels of ours. Products in the program are
then described to the public route for each kind of GPU, whose operators check shapes, strides and dtypes of their own.
"""

import unittest
from unittest import mock

import pytest
import torch
from parameterized import parameterized

import hop
from cutlass_kernels import operators, public
from cutlass_kernels.devices import capability_of
from cutlass_kernels.product import Product
from tests.support.gpu_programs import BF16, MM, OUT, ROWS, aten, called_by, on_gpu, products, program
from tests.support.schemes import EVERY

CAPABILITIES = {"Ampere": (8, 0), "Ada": (8, 9), "Hopper": (9, 0), "Blackwell": (10, 0), "small Blackwell": (12, 0)}


class TestSchemes(unittest.TestCase):
    @parameterized.expand([(name,) for name in EVERY])
    @pytest.mark.quick(12)
    def test_runs_by_operators_of_pytorch(self, name: str) -> None:
        """Products have an operator on each GPU, and all else is ATen, which Inductor fuses."""
        graph, y = program(EVERY[name], CAPABILITIES["Hopper"])
        assert (y.shape, y.dtype, y.device.type) == ((ROWS, OUT), BF16, "cuda")
        operators_of = [n.target for n in graph.nodes if n.op == "call_function"]
        strange = {
            str(t)
            for t in operators_of
            if t is not MM and str(t).split(".")[0] not in ("aten", "prims", "<built-in function getitem>")
        }
        assert not strange, strange
        found = list(products(graph))
        assert found or any(t in (aten.mm.default, aten.addmm.default, aten.bmm.default) for t in operators_of)
        for p, result in found:
            for capability in CAPABILITIES.values():
                made = public.run(p, capability)
                assert (made.shape, made.dtype) == (result.shape, result.dtype), (name, capability)

    def test_every_scheme_is_here(self) -> None:
        assert len(EVERY) > 20 and set(hop.schemes.SCHEMES) <= set(EVERY)

    def test_our_kernels_are_left_out(self) -> None:
        with on_gpu((9, 0)), mock.patch("cutlass_kernels.operators.missing", lambda: None):
            x = torch.empty(64, 128, dtype=torch.int8, device="cuda")
            routes = operators.routes(
                Product(x, torch.empty(64, 128, dtype=torch.int8, device="cuda").mT, torch.int32), (9, 0)
            )
        assert routes[0] == ("hopper", "HOP_GPU_KERNELS=off") and routes[-1] == ("public", None)


class TestOperators(unittest.TestCase):
    """Which operator of PyTorch multiplies on which GPU."""

    @parameterized.expand(
        [
            ("INT8_DYNAMIC", dict.fromkeys(CAPABILITIES, "_int_mm")),
            (
                "FP8_DYNAMIC_ROW",
                {"Ampere": "mm", "Ada": "_scaled_mm", "Hopper": "_scaled_mm", "Blackwell": "_scaled_mm"},
            ),
            ("MXFP8_DYNAMIC", {"Ampere": "mm", "Ada": "mm", "Hopper": "mm", "Blackwell": "_scaled_mm"}),
            ("NVFP4_DYNAMIC", {"Ampere": "mm", "Ada": "mm", "Hopper": "mm", "Blackwell": "_scaled_mm"}),
            ("MXFP4_DYNAMIC", dict.fromkeys(CAPABILITIES, "mm")),
        ]
    )
    @pytest.mark.full
    def test_operator(self, name: str, wanted: dict[str, str]) -> None:
        graph, _ = program(EVERY[name], CAPABILITIES["Hopper"])
        ((p, _),) = products(graph)
        for gpu, op in wanted.items():
            called = called_by(p, CAPABILITIES[gpu])
            assert called == {op}, (gpu, called)

    def test_gpus_of_amd(self) -> None:
        """Their capabilities are numbers of another kind: integers have torch._int_mm, and floats are decoded."""
        with (
            mock.patch.object(torch.version, "hip", "7.0"),
            mock.patch("torch.cuda.get_device_capability", lambda *_: (9, 0)),
        ):
            assert capability_of(torch.device("cuda", 0)) == (0, 0)
            with on_gpu((9, 0)):
                x, w = (torch.empty(n, 128, dtype=torch.int8, device="cuda") for n in (64, 32))
                routes = operators.routes(Product(x, w.mT, torch.int32), capability_of(x.device))
        assert [name for name, _ in routes] == ["hopper", "registry", "public"] and "0.0" in str(routes[0][1])
        for name, op in (("INT8_DYNAMIC", "_int_mm"), ("FP8_DYNAMIC_ROW", "mm"), ("MXFP8_DYNAMIC", "mm")):
            ((p, _),) = products(program(EVERY[name], (9, 0))[0])
            assert called_by(p, (0, 0)) == {op}
