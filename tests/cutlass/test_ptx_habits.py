"""The habits of the emulator, each shown by a small kernel that counts on what hardware does not promise."""

import unittest
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray
from parameterized import parameterized

from tests.cutlass.test_ptx import LOAD, PARAMETERS, gemm, kernel, multiply, run
from tests.ptx import HABITS, Fault, Habits, Memory, TensorMap, habits, launch
from tests.ptx.habits import KINDS


def loaded(waits: str, *names: str) -> NDArray:
    """What a warp reads of the first of two loads of 32 numbers, each with an mbarrier, after it has waited so."""
    wait = "{{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [%r1+{}], 0; @P bra.uni E; bra.uni W; E: }}"
    ptx = kernel(f"""
    mov.b32 %r1, smem; mov.u32 %r3, %tid.x; setp.ne.u32 %p1, %r3, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r1], 1; mbarrier.init.shared.b64 [%r1+8], 1; fence.mbarrier_init.release.cluster;
    mov.b64 %d1, a; cvta.param.u64 %d1, %d1; mov.b32 %r4, 0; mov.b32 %r5, 32;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128; mbarrier.arrive.expect_tx.shared.b64 _, [%r1+8], 128;
    {LOAD.replace("2d", "1d")} [%r1+128], [%d1, {{%r4}}], [%r1];
    {LOAD.replace("2d", "1d")} [%r1+256], [%d1, {{%r5}}], [%r1+8];
    READY: bar.warp.sync -1;
    {" ".join(wait.format(8 * int(i)) for i in waits)}
    shl.b32 %r7, %r3, 2; add.s32 %r9, %r7, %r1; ld.shared.b32 %r10, [%r9+128];
    ld.param.u64 %d2, [c]; cvt.u64.u32 %d3, %r7; add.s64 %d2, %d2, %d3; st.global.b32 [%d2], %r10;
    {wait.format(0)} {wait.format(8)}
    """, PARAMETERS)  # fmt: skip
    x, y, memory = np.arange(64, dtype=np.uint32), np.zeros(32, np.uint32), Memory()
    source = TensorMap(memory.add(x), 4, (64,), (), (32,))
    run(ptx, [source, memory.add(y)], memory, dynamic_shared_bytes=512, habits=habits(*names))
    return y


class Loads(unittest.TestCase):
    @parameterized.expand([
        ("0", set()), ("01", set()), ("1", {"reordered_loads"}), ("", {"late_loads", "reordered_loads"})
    ])  # fmt: skip
    def test_waits(self, waits, wrong):
        """For its own barrier it is right; for the other's, if loads land in order; without, if they do at once."""
        found = {name for name in HABITS if not np.array_equal(loaded(waits, name), np.arange(32))}
        self.assertEqual(found, wrong)


def sent(wait: str, *names: str) -> NDArray:
    """What a block finds of 32 times four numbers that another one stores in its shared memory."""
    ptx = kernel(f"""
    mov.b32 %r1, smem; mov.u32 %r3, %tid.x; setp.ne.u32 %p1, %r3, 0; mov.u32 %r2, %cluster_ctarank;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster;
    READY: bar.warp.sync -1; barrier.cluster.arrive; barrier.cluster.wait;
    shl.b32 %r4, %r3, 4; add.s32 %r5, %r4, %r1; setp.eq.u32 %p2, %r2, 0;
    @%p2 bra OWNER;
    add.s32 %r5, %r5, 64; mapa.shared::cluster.u32 %r6, %r5, 0; mapa.shared::cluster.u32 %r7, %r1, 0;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r6], {{%r3, %r3, %r4, %r3}}, [{wait or "%r7"}];
    bra.uni END;
    OWNER:
    @%p1 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 512;
    WAIT: {"" if wait else "mbarrier.try_wait.parity.shared.b64 %p3, [%r1], 0; @!%p3 bra WAIT;"}
    ld.shared.b32 %r10, [%r5+72];
    ld.param.u64 %d2, [c]; mad.wide.u32 %d2, %r3, 4, %d2; st.global.b32 [%d2], %r10;
    END: barrier.cluster.arrive; barrier.cluster.wait;
    """, ".param .u64 c")  # fmt: skip
    y, memory = np.zeros(32, np.uint32), Memory()
    launch(ptx, None, grid=(2,), block=(32,), cluster=(2,), parameters=[memory.add(y)], memory=memory,
           dynamic_shared_bytes=1024, habits=habits(*names))  # fmt: skip
    return y


class Stores(unittest.TestCase):
    @parameterized.expand([(name,) for name in HABITS])
    def test_into_another_block(self, name):
        np.testing.assert_array_equal(sent("", name), 16 * np.arange(32))

    def test_that_signal_elsewhere(self):
        with self.assertRaisesRegex(Fault, "another block than it fills"):
            sent("%r1")

    def test_that_nobody_waits_for(self):
        with self.assertRaisesRegex(Fault, "ends before this is done"):
            sent("%r7", "late_loads")


class Products(unittest.TestCase):
    @parameterized.expand(
        [("", True), ("add.s32 %r40, %r40, 0;", False), ("mov.b32 %r50, %r40;", False), ("mov.b32 %r51, %r50;", True)]
    )
    def test_one_fence(self, between, right):
        """Products of one shape in the same accumulators need no other, unless something else uses those."""
        fence = "wgmma.fence.sync.aligned;"
        ptx = gemm(stages=2).replace(fence, "").replace("LOOP:", f"{fence} LOOP:")
        ptx = ptx.replace("NEXT:", f"NEXT: @!%p2 bra AFTER; bra.uni SKIP; AFTER: {between} SKIP: ")
        if right:
            got, expected = multiply(ptx)
            np.testing.assert_array_equal(got, expected)
        else:
            with self.assertRaisesRegex(Fault, "since the last wgmma.fence"):
                multiply(ptx)


class Drawn(unittest.TestCase):
    def test_each_is_drawn(self):
        """The seeds that tests take have whatever each habit does, but for the order of warps, which is at random."""
        drawn = [Habits.drawn(np.random.default_rng(seed)) for seed in range(12)]
        for kind in (*KINDS, "products"):
            self.assertIn(0.0, {getattr(h, kind) for h in drawn})
        self.assertEqual({h.gives_up for h in drawn}, {False, True})

    def test_names_are_of_what_there_is(self):
        known = {f.name for f in fields(Habits)}
        for changes in HABITS.values():
            self.assertLessEqual(changes.keys(), known)
        self.assertEqual(len({habits(name) for name in HABITS}), len(HABITS))
