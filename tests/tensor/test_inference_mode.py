"""torch.inference_mode: every rule of QuantizedTensor, modules and files give what they give under no_grad.

Tensors are made inside and outside of it."""

import contextlib
import copy
import io
import tempfile
import unittest
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
import hop.nn
from hop import QuantizedTensor
from hop import presets as P
from hop.nn.weights.master import Gathering, MasterWeight
from tests.tensor import test_quantized_tensor as table_tests
from tests.tensor.test_quantized_tensor import BY_NAME, CALLS, OTHERS, QUANTIZERS, listed, made, numbers, quietly

aten = torch.ops.aten
SOME = [(name, QUANTIZERS[name]) for name in ("int8_row", "int4", "nvfp4")]
WITHOUT_GRADIENTS = {check for op, check in OTHERS.items() if op is not aten._has_same_storage_numel.default}


def made_ordinary(*args: Any, **kwargs: Any) -> QuantizedTensor:
    """`made`, outside of inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return made(*args, **kwargs)


@contextlib.contextmanager
def making_ordinary() -> Iterator[None]:
    with mock.patch.object(table_tests, "made", made_ordinary):
        yield


class TestRules(unittest.TestCase):
    def check_views(self, q: Any, shape: tuple[int, ...]) -> None:
        for op, name, call in CALLS:
            with self.subTest(call=name):
                b = made(q, *shape)
                with torch.no_grad():
                    want = table_tests.check_view(op, call, b)
                with torch.inference_mode():
                    assert table_tests.check_view(op, call, b) == want
                    results = listed(quietly(call, op, b)[0])
                    assert not any(t.is_inference() for t in results if isinstance(t, Tensor) and op.is_view)
                    inside = made(q, *shape)
                    assert table_tests.check_view(op, call, inside) == want
                assert table_tests.check_view(op, call, inside) == want

    @parameterized.expand(SOME)
    @pytest.mark.quick(3)
    def test_views(self, _name, q):
        self.check_views(q, (64, 128))

    @parameterized.expand([row for row in BY_NAME if row not in SOME])
    @pytest.mark.full
    @pytest.mark.sampled(4)
    def test_views_of_others(self, _name, q):
        for shape in ((64, 128), (2, 1, 4, 32), ()):
            self.check_views(q, shape)

    @parameterized.expand(
        [(check.__name__[6:], check) for check in sorted(WITHOUT_GRADIENTS, key=lambda c: c.__name__)]
    )
    @pytest.mark.quick(4)
    def test_others(self, _name, check):
        for name, q in QUANTIZERS.items():
            with self.subTest(quantizer=name), torch.inference_mode():
                check(q)
                with making_ordinary():
                    check(q)


COMPOSITES: dict[str, Callable[[Any], Any]] = {
    "to_dtype": lambda t: t.to(torch.bfloat16),
    "to_same": lambda t: t.to(torch.float32),
    "to_device": lambda t: t.to("cpu"),
    "to_integers": lambda t: t.to(torch.int32),
    "half": lambda t: t.half(),
    "type": lambda t: t.type(torch.float16),
    "type_as": lambda t: t.type_as(torch.ones(1, dtype=torch.bfloat16)),
    "contiguous": lambda t: t.t().contiguous(),
    "reshape": lambda t: t.reshape(4, 16, 128),
    "reshape_that_copies": lambda t: t.view(4, 16, 128).transpose(0, 1).reshape(64, 128),
    "reshape_as": lambda t: t.reshape_as(torch.empty(128, 64)),
    "flatten": lambda t: t.view(4, 16, 128).flatten(0, 1),
    "unflatten": lambda t: t.unflatten(0, (2, 32)),
    "T": lambda t: t.T,
    "mT": lambda t: t.mT,
    "movedim": lambda t: t.movedim(0, 1),
    "swapaxes": lambda t: t.swapaxes(0, 1),
    "narrow": lambda t: t.narrow(0, 0, 8),
    "chunk": lambda t: t.chunk(2),
    "tensor_split": lambda t: t.tensor_split(2),
    "hsplit": lambda t: t.hsplit(2),
    "iterated": lambda t: list(t)[3],
    "indexed": lambda t: (t[None], t[..., 0:32], t[5]),
    "expand_as": lambda t: t[None].expand_as(torch.empty(2, 64, 128)),
    "broadcast_to": lambda t: t.broadcast_to(2, 64, 128),
    "vstack": lambda t: torch.vstack([t, t]),
    "atleast_3d": lambda t: torch.atleast_3d(t),
    "filled": lambda t: torch.empty_like(t).copy_(t),
    "data": lambda t: t.data,
    "parameter": lambda t: nn.Parameter(t, requires_grad=False).detach(),
    "copied": copy.deepcopy,
    "linear": lambda t: nn.functional.linear(torch.ones(2, 128), t[:32]),
    "matmul": lambda t: torch.ones(2, 128) @ t.T,
    "einsum": lambda t: torch.einsum("bk,nk->bn", torch.ones(2, 128), t),
    "cross_entropy": lambda t: nn.functional.cross_entropy(t, torch.arange(64)),
    "hinge": lambda t: nn.functional.hinge_embedding_loss(t, torch.ones(64, 128)),
}


class TestComposites(unittest.TestCase):
    @parameterized.expand(COMPOSITES.items())
    def test_alike(self, _name, function):
        """Operators that are composed of others are decomposed, as autograd's keys do it outside of inference mode."""
        for q in (P.INT8_ROW, P.INT4_32):
            b = made(q, 64, 128)
            with torch.no_grad():
                want, warned = quietly(function, b)
            with torch.inference_mode():
                inside = made(q, 64, 128)
                results = [quietly(function, b), quietly(function, inside)]
            for got, warnings in (*results, quietly(function, inside)):
                table_tests.assert_alike(got, want)
                assert warnings == warned


class LM(nn.Module):
    """Layers of several kinds, with a head that is the transposed embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear, self.convolution = nn.Embedding(100, 64), nn.Linear(64, 64), nn.Conv1d(64, 64, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.linear(self.table(ids)))
        return self.convolution(x.transpose(1, 2)).transpose(1, 2) @ self.table.weight.T


IDS = torch.arange(5)[None]


def lm(scheme: str) -> nn.Module:
    torch.manual_seed(0)
    return hop.quantize_(LM().eval(), scheme)


def read_back(m: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(m.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def stored(m: nn.Module) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        hop.storage.save_file(m.state_dict(), Path(folder) / "m.safetensors")
        return hop.storage.load_file(Path(folder) / "m.safetensors")


def loaded(m: nn.Module, **options: Any) -> Tensor:
    other = copy.deepcopy(m)
    assert not any(other.load_state_dict(m.state_dict(), **options))
    return other(IDS)


def compiled_slice(model: Any) -> Tensor:
    linear = torch.compile(lambda x: nn.functional.linear(x, model.linear.weight[:32]), backend="eager")
    return linear(torch.ones(2, 64))


ON_MODELS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m(IDS),
    "state_dict": lambda m: m.state_dict(),
    "load_state_dict": loaded,
    "load_by_assigning": lambda m: loaded(m, assign=True),
    "deepcopy": lambda m: copy.deepcopy(m)(IDS),
    "to_device": lambda m: m.to("cpu").state_dict(),
    "to_meta": lambda m: [(type(p), p.device) for p in m.to("meta").parameters()],
    "to_empty": lambda m: [type(p) for p in m.to_empty(device="cpu").parameters()],
    **{
        how: lambda m, how=how: [getattr(m, how)().state_dict(), m(IDS)]
        for how in ("half", "bfloat16", "double", "float")
    },
    "saved": read_back,
    "stored": stored,
    "functional_call": lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (IDS,)),
    "compiled": compiled_slice,
}


def described(result: Any) -> Any:
    """`result` with its tensors in a form that == compares."""
    if isinstance(result, Tensor):
        return type(result), result.dtype, getattr(result, "quantizer", None), numbers(result).tolist()
    if isinstance(result, dict):
        return {key: described(x) for key, x in result.items()}
    return [described(x) for x in result] if isinstance(result, list) else result


@pytest.mark.filterwarnings("ignore:.*QuantizedTensor:UserWarning")
class TestModels(unittest.TestCase):
    @parameterized.expand(
        [(f"{name}_{scheme}", f, scheme) for name, f in ON_MODELS.items() for scheme in ("int8", "int4")]
    )
    @pytest.mark.quick(4)
    def test_alike(self, _name, function, scheme):
        with torch.no_grad():
            want = described(function(lm(scheme)))
        ordinary = lm(scheme)
        with torch.inference_mode():
            assert described(function(ordinary)) == want
            assert described(function(lm(scheme))) == want


class TestMasterWeights(unittest.TestCase):
    def test_views_and_composites(self):
        layer = nn.Linear(64, 8)
        gathering = Gathering(P.INT8_ROW, (8, 64), False, None, weakref.ref(layer), False)
        w = MasterWeight(torch.randn(8, 64), gathering)
        for function in (
            lambda t: t.T,
            lambda t: t.half(),
            lambda t: t[2:4],
            lambda t: t.view(-1),
            lambda t: t.detach(),
            lambda t: t.clone(),
            lambda t: t.chunk(2)[1],
            lambda t: t.reshape(4, 128),
        ):
            with torch.no_grad():
                want = function(w)
            with torch.inference_mode():
                got = function(w)
            assert type(got) is type(want) is MasterWeight and got.dtype == want.dtype
            assert torch.equal(got.data_, want.data_)
