"""MatMulNBits: a product with a constant weight in blocks of 2, 4 or 8 bits, which the file has packed.

Before the program is traced, `unpacked` replaces the packed codes and zero points by signed ones with a byte each, less
2^(bits - 1); `product` converts the node. Columns in an order of groups (g_idx) are sorted by group, and the input is
permuted with them.
"""

from collections.abc import MutableMapping
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from hop.dispatch.operators import aten
from hop.export.targets.onnx_import.calls import Call
from hop.export.targets.onnx_import.codes import dequantized
from hop.export.targets.onnx_import.reading import Constant, FileNode
from hop.numerics.spelling import shown

OP = "com.microsoft.MatMulNBits"
_KINDS = {2: "INT4", 4: "INT4", 8: "INT8"}
_LEAST_BLOCK = 16
_SIZES = ("K", "N", "block_size", "bits")


def unpacked(node: FileNode, constants: MutableMapping[str, Constant]) -> FileNode:
    """The node with constants that have a byte per code, which are added to `constants`.

    Raises NotImplementedError for an unsupported node, and ValueError for one whose constants do not fit.
    """
    given = tuple(node.attributes.get(name, d) for name, d in zip(_SIZES, (0, 0, 0, 4), strict=True))
    sizes = [v for v in given if isinstance(v, int)]
    if len(sizes) < len(given) or sizes[-1] not in _KINDS:
        _refuse(f"its K, N, block_size and bits are {shown(given)}; bits may be 2, 4 or 8")
    k, n, block, bits = sizes
    if k < 1 or n < 1 or block < _LEAST_BLOCK or block & (block - 1):
        raise ValueError(f"its K, N and block_size are {k}, {n} and {block}; the block's size is a power of 2 from 16")
    inputs = [*node.inputs, *[""] * 6][:6]
    known = [constants.get(name) for name in inputs[:5]]
    if any(x is None and (inputs[i] or i < 3) for i, x in enumerate(known[1:], 1)):
        _refuse("its weight, scales, zero points or g_idx are not constants")
    assert known[1] is not None and known[2] is not None
    blocks = -(-k // block)
    codes = _codes(known[1], bits, n * blocks, block, "codes").reshape(n, blocks * block)
    scales = known[2].data
    if scales.numel() != n * blocks or not scales.is_floating_point():
        raise ValueError(f"it has {scales.numel()} scales of {scales.dtype}, and needs {n * blocks} floats")
    zeros = torch.zeros(n, blocks, dtype=torch.int8)
    if known[3] is not None:
        zeros = _zeros(known[3], bits, n, blocks)
    order = None
    if known[4] is not None:
        if bits == 8:
            _refuse("it has g_idx and 8 bits, which onnxruntime does not run; quantize without reordered groups")
        order = _order(known[4].data, k, block)
        if bool(zeros.any()):  # onnxruntime ignores them there
            _refuse(f"it has both g_idx and zero points other than {2 ** (bits - 1)}; quantize symmetrically")
        codes = torch.cat([codes[:, order], codes[:, k:]], 1)
    added = {
        "codes": Constant.of(codes, _KINDS[bits]),
        "scales": Constant.of(scales.to(torch.float32).reshape(n, blocks)),
        "zeros": Constant.of(zeros, _KINDS[bits]),
    }
    if order is not None:
        added["order"] = Constant.of(order)
    names = [f"{node.outputs[0]}/{name}" for name in added]
    if taken := [name for name in names if name in constants]:
        _refuse(f"the file has a tensor {shown(taken[0])}, whose name this operator needs; rename it")
    constants.update(zip(names, added.values(), strict=True))
    return replace(node, inputs=(inputs[0], *names[:3], inputs[5], *names[3:]))


def _refuse(why: str) -> NoReturn:
    raise NotImplementedError(why)


def _codes(packed: Constant, bits: int, rows: int, size: int, what: str) -> Tensor:
    """Rows of `size` signed codes; each row starts at a byte, the first code in its lowest bits."""
    each = 8 // bits
    width = -(-size // each)
    if packed.kind != "UINT8" or packed.data.numel() != rows * width:
        raise ValueError(
            f"its {what} are {packed.kind} with {packed.data.numel()} elements, and must be UINT8 with {rows * width}"
        )
    x = packed.data.reshape(rows, width, 1).to(torch.int16)
    x = (x >> torch.arange(0, 8, bits, dtype=torch.int16)) & (2**bits - 1)
    return (x.reshape(rows, width * each)[:, :size] - 2 ** (bits - 1)).to(torch.int8)


def _order(groups: Tensor, k: int, block: int) -> Tensor:
    """The columns sorted by group, from the group of each."""
    if groups.dtype != torch.int32 or groups.numel() != k:
        raise ValueError(f"its g_idx is {groups.dtype} with {groups.numel()} elements, and must be int32 with {k}")
    order = torch.argsort(groups.reshape(-1), stable=True)
    if not torch.equal(groups.reshape(-1)[order].to(torch.int64), torch.arange(k) // block):
        _refuse(f"its g_idx does not assign {block} columns to each group; quantize with groups of that size")
    return order


def _zeros(given: Constant, bits: int, n: int, blocks: int) -> Tensor:
    """Signed zero points, which the file has packed, or as floats."""
    if not given.data.is_floating_point():
        return _codes(given, bits, n, blocks, "zero points")
    whole = given.data.to(torch.float32) - 2 ** (bits - 1)
    if whole.numel() != n * blocks or not torch.equal(
        whole, whole.round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    ):
        _refuse("its zero points are floats that are no codes; quantize with whole zero points, or none")
    return whole.to(torch.int8).reshape(n, blocks)


def product(call: Call) -> Tensor:
    """The product of floats with a weight in blocks; onnxruntime sums it in floats."""
    x, k, block = call.tensor(0), call.attribute("K", 0), call.attribute("block_size", 0)
    call.mark_read("N", "bits")
    call.only("weight_prepacked", 0)  # others are layouts of CUDA kernels
    call.only("accuracy_level", 0, 1, 2, 3, 4)  # the least: float32 sums are at every level
    if x.shape[-1] != k:
        raise ValueError(f"its input has the shape {tuple(x.shape)}, and its last dimension must be {k}")
    weight, y = dequantized(call, 1, 2, 3, 1, block), x.to(torch.float32)
    if (order := call.optional(5)) is not None:
        y = aten.index_select.default(y, -1, order)
    if more := weight.shape[1] - k:
        y = aten.constant_pad_nd.default(y, [0, more], 0.0)
    bias = call.optional(4)
    return aten.linear.default(y, weight, None if bias is None else bias.to(torch.float32)).to(x.dtype)
