"""What watches calls: ranges of the profiler, FLOPs by call, symbolic traces."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import hop

LINEAR = torch.ops.aten.linear.default
ROWS = hop.presets.INT8_ROW


def weight() -> hop.QuantizedTensor:
    return hop.quantize(ROWS, torch.randn(256, 128))


def names(function, *args):
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as measured:
        function(*args)
    return [e.name for e in measured.events() or () if e.name.startswith("hop::")]


class TestRanges:
    def test_a_call_is_one_range(self):
        x, w = hop.quantize(ROWS, torch.randn(4, 128)), weight()
        call = lambda: hop.scaled(LINEAR, torch.bfloat16, x, w)  # noqa: E731
        assert names(call) == ["hop::scaled[linear, int8 x int8 -> bfloat16, 4x256x128]"]

    def test_a_call_that_makes_others_is_one_too(self):
        x, w = torch.randn(4, 128), torch.randn(256, 128)
        found = names(lambda: hop.quantized(LINEAR, hop.schemes.INT8_DYNAMIC, x, w))
        assert found == ["hop::quantized[linear, float32 x float32, 4x256x128]"]

    def test_results_are_the_same(self):
        x, w = hop.quantize(ROWS, torch.randn(4, 128)), weight()
        want = hop.scaled(LINEAR, torch.float32, x, w)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True):
            got = hop.scaled(LINEAR, torch.float32, x, w)
        assert torch.equal(got, want)

    def test_an_error_ends_the_range(self):
        x, w = torch.randn(4, 128), weight()
        with profile(activities=[ProfilerActivity.CPU], acc_events=True), pytest.raises(RuntimeError):
            hop.scaled(LINEAR, torch.float32, x[:, :3], w)
        assert names(lambda: hop.dequantize(w)) == ["hop::dequantize[int8, 256x128]"]


class TestOperations:
    def test_flops_of_both_are_in_one_table(self):
        w, ones = weight(), torch.ones(256, 32)

        def function(x):
            return hop.scaled(LINEAR, torch.float32, hop.quantize(ROWS, x), w) @ ones

        x = torch.randn(64, 128)
        found = {o.name: o for o in hop.report.operations(function, x)}
        ours = found["hop::scaled[linear, int8 x int8 -> float32, 64x256x128]"]
        assert (ours.calls, ours.flops) == (1, 2 * 64 * 256 * 128)
        assert found["aten::mm"].flops == 2 * 64 * 256 * 32
        assert found["hop::quantize[float32 -> int8, 64x128]"].flops == 0
        assert all(o.seconds > 0 for o in found.values())
        with FlopCounterMode(display=False) as counter:
            function(x)
        assert counter.get_total_flops() == sum(o.flops for o in found.values())
        lines = hop.report.table(list(found.values())).splitlines()
        assert len(lines) == len(found) + 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight(), requires_grad=False)
        self.layers = nn.Sequential(hop.nn.Linear(256, 128, scheme=hop.schemes.INT8_DYNAMIC), nn.ReLU())

    def forward(self, x):
        codes = hop.quantize(ROWS, x)
        y = hop.scaled(LINEAR, torch.float32, codes, self.weight) + hop.fake_quantize(ROWS, hop.dequantize(codes)).sum()
        z = hop.quantized(LINEAR, hop.schemes.INT8_DYNAMIC, self.layers(y), x)
        return z + hop.out_dtype(torch.ops.aten.mm.default, torch.float32, x.half(), x.half().t())


class TestSymbolicTraces:
    def test_operators_and_layers_are_calls(self):
        model, x = Model(), torch.randn(4, 128)
        traced = torch.fx.symbolic_trace(model)
        targets = [n.target for n in traced.graph.nodes]
        ours = (hop.quantize, hop.scaled, hop.fake_quantize, hop.dequantize, hop.quantized, hop.out_dtype)
        assert {t for t in targets if t in ours} == set(ours)
        assert "layers.0" in targets
        assert torch.equal(traced(x), model(x))
