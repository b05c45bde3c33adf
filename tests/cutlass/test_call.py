"""What a call of a plan does on the host, without the DSL."""

import unittest

import torch

from cutlass_kernels import hopper


class TestVectors(unittest.TestCase):
    def test_a_view_is_made_once(self):
        flat, x = hopper._kept_flat(), torch.arange(4.0)[:, None]
        first = flat(x)
        self.assertIs(flat(x), first)
        self.assertEqual((first.shape, first.data_ptr()), ((4,), x.data_ptr()))
        x[2] = 7.0
        self.assertEqual(flat(x)[2], 7.0)

    def test_other_memory_is_seen(self):
        flat, x = hopper._kept_flat(), torch.zeros(4, 1)
        flat(x)
        x.data = torch.ones(4, 1)
        self.assertTrue((flat(x) == 1).all())
        x.resize_(2, 1)
        self.assertEqual(flat(x).shape, (2,))
        other = torch.full((4, 1), 2.0)
        self.assertTrue((flat(other) == 2).all())

    def test_copies_are_made_anew(self):
        flat, x = hopper._kept_flat(), torch.zeros(2, 8)[:, ::2]
        flat(x)
        x.fill_(3.0)
        self.assertTrue((flat(x) == 3).all())
