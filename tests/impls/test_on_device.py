"""pytest --device cuda: the cases of the routes lie on the GPU with all their tensors, here as tensors without data."""

import itertools
import unittest
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from tests.support import case as case_module
from tests.support.case import Case
from tests.support.cases import FLOAT, GRADIENT, INTEGER, OPERATORS
from tests.support.leaves import LEAVES, SETTINGS
from tests.support.quantized import QUANTIZED
from tests.support.scaled import SCALED

MAKERS = {
    **{f"out_dtype_{o.name}": lambda o=o: [o.case(f) for f in (INTEGER, FLOAT, GRADIENT)] for o in OPERATORS},
    **{
        f"{leaf.name}_{s.name}": lambda leaf=leaf, s=s: [leaf.case(s), leaf.gradient_case(s)]
        for leaf, s in itertools.product(LEAVES, SETTINGS)
    },
    **{f"scaled_{o.name}": lambda o=o: [o.case(), *o.gradient_cases()] for o in SCALED},
    **{f"quantized_{o.name}": lambda o=o: [o.case(), *o.gradient_cases()] for o in QUANTIZED},
}


class TestOnDevice(unittest.TestCase):
    @parameterized.expand(MAKERS.items())
    @pytest.mark.quick(15)
    def test_every_tensor_is_moved(self, _name, make):
        """A function of tensors on a GPU holds none on the CPU: fake tensors raise where two devices meet."""
        for case in make():
            with FakeTensorMode(allow_non_fake_inputs=True):
                on_gpu = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in case.tensors]
                for function in (case.function, case.reference, case.inner):
                    try:
                        found = tree_leaves(function(*on_gpu))
                    except RuntimeError as error:
                        if "not linked with support for cuda" in str(error):
                            self.skipTest("a PyTorch that was built for the CPU slices no fake tensor of a GPU")
                        raise
                    assert {x.device.type for x in found} == {"cuda"}

    def test_results_are_compared_on_the_cpu(self):
        """Here "meta" is the device."""
        seen = []
        own = Case(lambda x: x, [torch.ones(3)], seen.append, lambda x: x, lambda x: x)
        assert own.on_device() is own
        with mock.patch.object(case_module, "DEVICE", "meta"):
            moved = own.on_device()
            assert [x.device.type for x in moved.tensors] == ["meta"]
            with self.assertRaisesRegex(AssertionError, "lies on cpu, and not on meta"):
                moved.check(torch.ones(3))
        assert seen == []
