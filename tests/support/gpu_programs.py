"""Programs of quantized layers on GPUs, traced with tensors without data, and the operators that multiply there."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch._inductor.decomposition
import torch._inductor.virtualized
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import hop
from cutlass_kernels import operators as operators  # which defines cutlass_kernels::mm
from cutlass_kernels import public, trust
from cutlass_kernels.product import Product, without_data
from hop import QuantizedTensor

aten, MM = torch.ops.aten, torch.ops.cutlass_kernels.mm.default
BF16 = torch.bfloat16
ROWS, OUT, IN = 40, 96, 256


@contextlib.contextmanager
def without_device() -> Iterator[None]:
    """Calls that a PyTorch built for the CPU does not pass on to fake tensors of a GPU, as operators that it does."""
    indexed, made, packed = Tensor.__getitem__, torch.tensor, Tensor.contiguous

    def at(x: Tensor, index: Any) -> Tensor:
        each = index if isinstance(index, tuple) else (index,)
        if not x.is_cuda or not all(i is None or isinstance(i, int | slice) for i in each):
            return indexed(x, index)
        return sliced(x, each)

    def contiguous(x: Tensor, **format: Any) -> Tensor:
        if not x.is_cuda or format:
            return packed(x, **format)
        return x if x.is_contiguous() else aten.clone.default(x, memory_format=torch.contiguous_format)

    def tensor(data: Any, **options: Any) -> Tensor:
        if "cuda" not in str(options.get("device")):
            return made(data, **options)
        x = made(data, **options | {"device": "cpu"})
        return torch.empty(x.shape, dtype=x.dtype, device="cuda")

    with (
        mock.patch.object(Tensor, "__getitem__", at),
        mock.patch.object(Tensor, "contiguous", contiguous),
        mock.patch.object(torch, "tensor", tensor),
    ):
        yield


def sliced(x: Tensor, index: tuple[Any, ...]) -> Tensor:
    at = 0
    for i in index:
        if i is None:
            x, at = aten.unsqueeze.default(x, at), at + 1
        elif isinstance(i, int):
            x = aten.select.int(x, at, i)
        else:
            x, at = aten.slice.Tensor(x, at, i.start, i.stop, i.step or 1), at + 1
    return x


@contextlib.contextmanager
def on_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """As on a GPU, for tensors without data, and without kernels of ours."""
    properties = mock.Mock(multi_processor_count=132, major=capability[0], minor=capability[1])
    with (
        mock.patch("torch.cuda._lazy_init", lambda: None),
        mock.patch("torch.cuda.current_device", lambda: 0),
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.get_device_capability", lambda *_: capability),
        mock.patch("torch.cuda.get_device_properties", lambda *_: properties),
        mock.patch.dict(os.environ, {trust.VARIABLE: "off"}),
        FakeTensorMode(allow_non_fake_inputs=True),
        without_device(),
        torch.no_grad(),
    ):
        yield


def layer(scheme: hop.Scheme) -> nn.Module:
    """A quantized linear layer without data; static scales are found on the CPU."""
    model = nn.Sequential(nn.Linear(IN, OUT, dtype=BF16, device="meta"))
    for name, p in list(model[0].named_parameters()):
        setattr(model[0], name, nn.Parameter(torch.empty(p.shape, dtype=BF16, device="cuda")))
    return hop.quantize_(model, scheme)


def calibrated(scheme: hop.Scheme) -> nn.Module:
    model = nn.Sequential(nn.Linear(IN, OUT, dtype=BF16))
    return hop.quantize_(model, scheme, calibrate=[torch.randn(ROWS, IN, dtype=BF16)])


def move(model: nn.Module) -> None:
    """Replace parameters and buffers by tensors of a GPU without data."""

    def moved(x: Any) -> Any:
        if isinstance(x, QuantizedTensor):
            buffers = {name: moved(b) for name, b in x.buffers().items()}
            return QuantizedTensor.fitting(buffers, x.quantizer, x.shape, x.dtype)
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                module._parameters[name] = nn.Parameter(
                    moved(p.data if not isinstance(p, QuantizedTensor) else p), False
                )
        for name, b in list(module._buffers.items()):
            module._buffers[name] = None if b is None else moved(b)


def program(scheme: hop.Scheme, capability: tuple[int, int]) -> tuple[torch.fx.Graph, Tensor]:
    """The graph of a layer that Inductor compiles, and its result."""
    static = calibrated(scheme) if "Static" in str(scheme) else None
    with on_gpu(capability):
        if static is not None:
            move(static)
        model = (static or layer(scheme)).eval()
        x = torch.empty(ROWS, IN, dtype=BF16, device="cuda")
        graph = make_fx(model, decomposition_table=torch._inductor.decomposition.select_decomp_table())(x).graph
    (result,) = (n.args[0] for n in graph.nodes if n.op == "output")
    return graph, result.meta["val"]


def products(graph: torch.fx.Graph) -> Iterator[tuple[Product, Tensor]]:
    """The products in a graph, without data, and their results."""

    def value(x: Any) -> Any:
        return without_data(x.meta["val"]) if isinstance(x, torch.fx.Node) else x

    for n in graph.nodes:
        if n.target is MM:
            lhs, rhs, out, *_ = map(value, n.args)
            yield Product(lhs, rhs, out, **{name: value(x) for name, x in n.kwargs.items()}), n.meta["val"]


def called_by(p: Product, capability: tuple[int, int]) -> set[str]:
    """The operators of PyTorch that multiply on the public route."""
    called: set[str] = set()
    with contextlib.ExitStack() as stack:
        for own in ("_int_mm", "_scaled_mm", "mm"):
            real = getattr(torch, own)

            def noted(*args: Any, own: str = own, real: Any = real, **kwargs: Any) -> Tensor:
                called.add(own)
                return real(*args, **kwargs)

            stack.enter_context(mock.patch.object(torch, own, noted))
        public.run(p, capability)
    return called


def decoded_to(graph: torch.fx.Graph) -> str:
    """The dtype of the factors of torch.mm in a graph."""
    found = {n.args[0].meta["val"].dtype for n in graph.nodes if n.target in (aten.mm.default, aten.bmm.default)}
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
