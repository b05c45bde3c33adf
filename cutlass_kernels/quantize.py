"""Quantizing on a GPU by our own kernels: which variant, how its arguments are brought into form, and its launch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutlass_kernels import cache as kept
from cutlass_kernels.hopper import TARGET
from cutlass_kernels.quantizing import (
    CHUNK,
    GROUPS,
    LONGEST,
    MEMORY,
    MOST_THREADS,
    NORMS,
    THREADS,
    TILE,
    Columns,
    Largest,
    Request,
    Rows,
    Tiles,
)

_MOST = 2**31  # elements of a row
_BY_COLUMN = (-1, 1)
_DTYPES = {name: dtype for dtype, name in MEMORY.items()}


def declines(r: Request) -> str | None:
    """Why no kernel takes a request, or None: by dtypes, shapes and strides alone."""
    if r.x.numel() == 0:
        return "for matrices with elements"
    if max(r.x.shape) >= _MOST or r.x.numel() >= _MOST * CHUNK:
        return f"sizes must be below 2^31, got {tuple(r.x.shape)}"
    if r.operation and (reason := _declines_operation(r)) is not None:
        return reason
    plain = r.rule not in ("given", "two_level") and r.noise is None
    if r.block in ((TILE, TILE), _BY_COLUMN):
        return None if plain else f"blocks of {r.block} are for scales that are found, without noise"
    rows, columns = r.block
    whole = rows == -1 and columns == -1
    if not whole and rows != 1:
        return f"for blocks of one row, of {TILE} x {TILE} and of the whole matrix, not {r.block}"
    if columns not in (-1, *GROUPS):
        return f"for rows and groups of {GROUPS}, not {r.block}"
    if r.rule == "two_level" and columns == -1:
        return "a block under an outer amax is a group"
    return None


def _declines_operation(r: Request) -> str | None:
    if r.block[0] not in (1, -1) or (r.block == (-1, -1) and r.rule != "given") or r.block == _BY_COLUMN:
        return f"{r.operation} is for scales of rows, of groups within them, and given ones, not of blocks of {r.block}"
    if r.rule == "two_level" and r.scale is None:
        return f"{r.operation} comes before the amax of its results, which must be given"
    if r.operation in NORMS and r.x.shape[1] > LONGEST:
        return f"for norms of at most {LONGEST} elements, not {r.x.shape[1]}"
    return None


def tiles_of(r: Request) -> Tiles | None:
    """The kernel that makes the transposed copy of a request, or its blocks of 128 x 128; None without one."""
    square, whole, columns = r.block == (TILE, TILE), r.block == (-1, -1), r.block[1]
    rules = {"power_of_two": r.power_of_two, "most_of_dtype": r.most_of_dtype, "rounding": r.rounding}
    made = Tiles(r.x.dtype, r.elements, r.rule, square, vector=in_chunks(r.x), **rules)
    if r.block == _BY_COLUMN:
        return replace(made, straight=True)
    if (r.copies == "rowwise" and not square) or columns not in (-1, 16, 32, 64, TILE):
        return None
    made = replace(made, span=0 if square else max(columns, 0), reads=whole)
    if r.copies == "rowwise":
        return replace(made, row_wise=True, transposed=False)
    fits = square or whole or 0 < made.span <= made.width
    return replace(made, row_wise=r.copies == "both" and fits, vector=made.vector and r.x.shape[0] % CHUNK == 0)


def kernels_of(r: Request) -> list[Any]:
    """The kernels that a request takes, by its dtypes and shape."""
    found: list[Any] = []
    if r.scale is None and (r.block == (-1, -1) or r.rule == "two_level"):
        found.append(Largest(r.x.dtype, r.is_affine, vector=in_chunks(r.x), nan=r.keeps_nan))
    tiles = tiles_of(r)
    if tiles is not None:
        if tiles.is_by_column:
            found.append(Columns(r.x.dtype, r.is_affine, vector=in_chunks(r.x), nan=r.keeps_nan))
        found.append(tiles)
    if tiles is None and r.copies != "rowwise":
        found.append(variant_of(replace(r, x=r.x.t(), copies="rowwise")))
    if r.copies != "columnwise" and (tiles is None or not (tiles.row_wise or tiles.straight)):
        found.append(variant_of(r))
    return found


def variant_of(r: Request) -> Rows:
    """The kernel for a request that is not declined."""
    rows, columns = r.block
    whole = rows == -1 and columns == -1
    chunks = -(-r.x.shape[1] // CHUNK)
    held, threads = 2, THREADS
    if r.operation in NORMS or (columns == -1 and not whole and r.rule != "given"):
        across, most = _power(chunks, 32), MOST_THREADS // 2 if r.operation else MOST_THREADS  # by their registers
        held, threads = (2, max(THREADS, across)) if across <= most else (0, most)
    return Rows(
        r.x.dtype,
        r.elements,
        r.rule,
        max(columns, 0),
        held,
        threads,
        whole or r.rule == "two_level",
        in_chunks(r.x),
        "" if r.noise is None else "seed" if r.stream >= 0 else "bytes" if r.noise.dtype == torch.uint8 else "words",
        r.zero_point is not None,
        r.power_of_two,
        r.most_of_dtype,
        r.rounding,
        r.operation,
        "" if r.weight is None else MEMORY[r.weight.dtype],
        "" if r.bias is None else MEMORY[r.bias.dtype],
        "" if r.other is None else MEMORY[r.other.dtype],
    )


def in_chunks(x: Tensor) -> bool:
    """Whether rows are whole chunks, which kernels then read 16 bytes at a time."""
    return x.shape[1] % CHUNK == 0


def ready(x: Tensor) -> Tensor:
    """x with its columns innermost; rows of whole chunks begin at multiples of 16 bytes. What is not so is copied."""
    if x.stride(1) != 1 and x.shape[1] > 1:
        x = x.contiguous()
    steps = x.stride(0) * x.element_size() % 16 == 0 or x.shape[0] == 1
    if in_chunks(x) and not (steps and x.data_ptr() % 16 == 0):
        x = x.clone(memory_format=torch.contiguous_format)
    return x.as_strided(x.shape, (x.stride(0), 1))


def _power(chunks: int, least: int, held: int = 2) -> int:
    """The power of two of threads, from `least`, that have `chunks` of a row."""
    return max(least, 1 << (-(-chunks // held) - 1).bit_length())


def _shift(v: Any, columns: int) -> int:
    """The threads that have a row, or a tile of it, as a power of two."""
    chunks = -(-columns // CHUNK)
    if isinstance(v, Rows) and not v.in_tiles:
        return (min(_power(chunks, 32), MOST_THREADS) if v.held else v.threads).bit_length() - 1
    least = v.span // CHUNK if isinstance(v, Rows) else 1
    return min(_power(chunks, max(least, 1), v.held), v.threads).bit_length() - 1


# ---- compiling


def build(variant: Any, options: str = "") -> Any:
    """Compile a variant; no GPU is needed."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    from cutlass_kernels import quantize_columns, quantize_functions, quantize_norms, quantize_rows, quantize_tiles

    operation = getattr(variant, "operation", "")
    kernel = {
        Rows: quantize_norms.Norm
        if operation in NORMS
        else quantize_functions.Function
        if operation
        else quantize_rows.Quantize,
        Largest: quantize_rows.FindLargest,
        Tiles: quantize_tiles.QuantizeTiles,
        Columns: quantize_columns.FindColumns,
    }[type(variant)]
    arguments = _described(variant)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(kernel(variant), *arguments, stream, options=f"--gpu-arch {TARGET} --enable-tvm-ffi {options}")


def compiled(variant: Any) -> Callable[..., None]:
    return kept.kernel(variant.name, TARGET, lambda: build(variant))


def _described(v: Any) -> tuple[Any, ...]:
    """The arguments of a kernel without their data."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    from cutlass_kernels.frame_sm90 import TYPES

    def flat(kind: Any, align: int = 4) -> Any:
        return make_fake_tensor(kind, (cute.sym_int32(),), (1,), assumed_align=align)

    def matrix(dtype: torch.dtype) -> Any:
        align = 16 if v.vector else dtype.itemsize
        return make_fake_tensor(
            TYPES[dtype], (cute.sym_int32(), cute.sym_int32()), (cute.sym_int64(), 1), assumed_align=align
        )

    x = matrix(v.x)
    if isinstance(v, Largest):
        return x, flat(cutlass.Float32), cutlass.Int32(5)
    if isinstance(v, Columns):
        return x, flat(cutlass.Float32)

    def scale() -> Any:
        return flat(cutlass.Uint8, 1) if v.rule in ("mx", "two_level") else flat(cutlass.Float32)

    def copy() -> Any:
        align = 16 if v.vector else 1
        return flat(cutlass.Uint8, align), scale(), flat(cutlass.Uint8, 1) if v.is_affine else None

    if isinstance(v, Tiles):
        known = flat(cutlass.Float32) if v.reads or v.rule == "two_level" or v.is_by_column else None
        return x, copy() if v.row_wise else None, copy() if v.transposed else None, known, (cutlass.Float32(0),)
    others = (
        flat(cutlass.Uint8, 1) if v.has_second else None,
        flat(cutlass.Float32) if v.reads or v.rule in ("two_level", "given") else None,
        {"": None, "seed": flat(cutlass.Int64, 8), "bytes": flat(cutlass.Uint8, 1), "words": flat(cutlass.Int32)}[
            v.noise
        ],
        *(flat(TYPES[_DTYPES[t]], 16) if t else None for t in (v.weight, v.bias)),
        matrix(_DTYPES[v.other]) if v.other else None,
    )
    numbers = (cutlass.Float32(0), cutlass.Uint32(0), *([cutlass.Float64(0)] if v.operation in NORMS else []))
    given = None if all(t is None for t in others) else others
    return x, flat(cutlass.Uint8, 1), scale(), given, numbers, cutlass.Int32(5)


# ---- a call


def run(r: Request) -> list[Tensor]:
    """The buffers of `r.results`, on x's device and the current stream."""
    r = replace(r, x=ready(r.x), other=None if r.other is None else ready(r.other))
    amax = r.scale
    if amax is None and (r.block == (-1, -1) or r.rule == "two_level"):
        amax = largest(r.x, r.is_affine, r.keeps_nan)
    tiles = tiles_of(r)
    if tiles is not None:
        return _tiles(r, tiles, amax)
    found = _rows(replace(r, copies="rowwise"), amax) if r.copies != "columnwise" else []
    if r.copies != "rowwise":
        found += _rows(replace(r, x=r.x.t().contiguous(), copies="rowwise"), amax)
    return found


def _rows(r: Request, amax: Tensor | None) -> list[Tensor]:
    """The buffers of a row-wise copy. `amax` is that of the tensor, or the scale of "given"."""
    v, buffers = variant_of(r), _buffers(r)
    if r.rule in ("given", "two_level"):  # these results are the caller's, or what was found
        for buffer, own in zip(buffers[2 if r.rule == "two_level" else 1 :], (amax, r.zero_point), strict=False):
            assert own is not None
            buffer.copy_(own.view(buffer.shape))
    second = buffers[2] if v.has_second else None
    others = [None if t is None else flat_bytes(t) for t in (second, amax, r.noise, r.weight, r.bias)]
    others.append(r.other)
    given = None if all(t is None for t in others) else tuple(others)
    numbers = (float(r.floor), max(r.stream, 0), *([float(r.eps)] if r.operation in NORMS else []))
    compiled(v)(r.x, flat_bytes(buffers[0]), flat_bytes(buffers[1]), given, numbers, _shift(v, r.x.shape[1]))
    return buffers


def _tiles(r: Request, v: Tiles, amax: Tensor | None) -> list[Tensor]:
    """The copies by tiles, and by rows what these do not make."""
    if v.straight:
        buffers = _buffers(r)
        ends = columns_of(r.x, r.is_affine, r.keeps_nan)
        compiled(v)(r.x, None, _copy(v, buffers), ends, (float(r.floor),))
        return buffers
    row_wise = [] if r.copies == "columnwise" else _buffers(replace(r, copies="rowwise"))
    transposed = [] if r.copies == "rowwise" else _buffers(replace(r, copies="columnwise"))
    known = columns_of(r.x, r.is_affine, r.keeps_nan) if v.is_by_column else amax
    made = [_copy(v, row_wise) if v.row_wise else None, _copy(v, transposed) if v.transposed else None]
    compiled(v)(r.x, *made, None if known is None else flat_bytes(known), (float(r.floor),))
    if r.rule == "two_level":
        assert amax is not None
        for buffers in filter(None, (row_wise, transposed)):
            buffers[2].copy_(amax.view(1, 1))
    if row_wise and not v.row_wise:
        row_wise = _rows(replace(r, copies="rowwise"), amax)
    return row_wise + transposed


def _copy(v: Tiles, buffers: list[Tensor]) -> tuple[Tensor | None, ...]:
    return flat_bytes(buffers[0]), flat_bytes(buffers[1]), flat_bytes(buffers[2]) if v.is_affine else None


def _buffers(r: Request) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device=r.x.device) for shape, dtype in r.results()]


def flat_bytes(x: Tensor) -> Tensor:
    """A one-dimensional view at a multiple of 16 bytes; 8-bit elements as uint8."""
    flat = x.contiguous().view(-1)
    flat = flat if flat.data_ptr() % 16 == 0 else flat.clone()
    return flat.view(torch.uint8) if flat.element_size() == 1 else flat


def largest(x: Tensor, both: bool = False, nan: bool = False) -> Tensor:
    """float32: the largest magnitude of x; or the largest number above 0, and the magnitude of the least below 0. With
    `nan` the first is NaN if there is one; otherwise NaN is left out."""
    found = torch.zeros(2 if both else 1, dtype=torch.float32, device=x.device)
    v = Largest(x.dtype, both, vector=in_chunks(x), nan=nan)
    compiled(v)(x, found, _shift(v, x.shape[1]))
    return found


def columns_of(x: Tensor, both: bool = False, nan: bool = False) -> Tensor:
    """float32, of each column what `largest` finds of a tensor."""
    found = torch.zeros((2 if both else 1) * x.shape[1], dtype=torch.float32, device=x.device)
    compiled(Columns(x.dtype, both, vector=in_chunks(x), nan=nan))(x, found)
    return found
