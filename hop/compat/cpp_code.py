"""Bugs in the C++ that Inductor generates, each with a `patches` record."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hop.compat.patches import Changes, apply_needed, changing
from hop.compat.tracing import known_equal

if TYPE_CHECKING:
    import sympy
    from torch._inductor.codegen.cpp_utils import CppCSEVariable
    from torch._inductor.loop_body import LoopBody
    from torch._inductor.scheduler import SchedulerNode


@changing(
    "torch._inductor.codegen.cpp",
    "where an index divides by a number that does not divide the loop's length, such as a block size, Inductor's C++ "
    "silently drops the rest of the loop",
    "pytorch#132389",
    "pytorch#135335",
)
def loops_that_do_not_divide() -> Changes:
    from torch._inductor.codegen import cpp

    module = cpp
    split = module.CppScheduling.try_loop_split

    def divides(body: "LoopBody") -> bool:
        divisions = {d for e in body.indexing_exprs.values() if hasattr(e, "find") for d in e.find(module.FloorDiv)}
        loops = [(body.var_ranges[var], by) for var, by in (d.args for d in divisions) if var in body.var_ranges]
        return all(known_equal(size % by, 0) for size, by in loops)

    def split_if_it_divides(self: cpp.CppScheduling, nodes: "list[SchedulerNode]") -> "list[SchedulerNode]":
        found = [n.node.get_default_sizes_body() for n in nodes if n.node is not None]
        shapes = {tuple(sizes[0]) for sizes, _, _ in found}  # torch asserts that there is only one
        return split(self, nodes) if len(shapes) == 1 and all(divides(body) for _, body, _ in found) else nodes

    yield module.CppScheduling, "try_loop_split", split_if_it_divides


@changing(
    "torch._inductor.codegen.cpp_wrapper_cpu",
    "AOTInductor's C++ for CPUs lacks the headers of 8-bit floats and does not compile",
    until=(2, 13),
)
def headers_of_float8() -> Changes:
    from torch._inductor.codegen import cpp_wrapper_cpu

    cls: Any = cpp_wrapper_cpu.CppWrapperCpu
    path = cls.get_device_include_path
    names = (name for name in dir(torch) if name.startswith("float8_e") and name != "float8_e8m0fnu")
    includes = "\n".join(f"#include <c10/util/Float8_{name.removeprefix('float8_')}.h>" for name in sorted(names))
    yield cls, "get_device_include_path", staticmethod(lambda device: f"{path(device)}\n{includes}")


@changing(
    "torch._inductor.codecache",
    "with `cpp_wrapper`, a list result with one tensor is read as a tensor, from address 0; only our operators are "
    "fixed",
    "pytorch#190551",
    until=(2, 14),
)
def lists_of_one_tensor() -> Changes:
    from torch._inductor import codecache

    module = codecache
    call: Callable[..., object] = module.custom_op_wrapper

    def call_and_take_the_one(op: str, *args: object) -> object:
        result = call(op, *args)
        if op.startswith("torch.ops.hop_native.") and isinstance(result, list) and len(result) == 1:
            return result[0]
        return result

    yield module, "custom_op_wrapper", call_and_take_the_one


@changing(
    "torch._inductor.codegen.cpp",
    "Inductor's C++ for AVX2 loads 8 numbers of 8 or 16 bits through a buffer in memory and stalls on it, "
    "which takes two to four times eager mode's time; AVX-512 is not affected",
)
def loads_of_part_vectors() -> Changes:
    from torch._inductor.codegen import cpp

    cls = cpp.CppVecKernel
    load_line = cls._get_vec_load_line
    narrow = (torch.int8, torch.uint8, torch.int16, torch.bfloat16, torch.float16)
    loads = {8: "_mm_loadl_epi64", 16: "_mm_loadu_si128"}  # by bytes; the rest of the vector is zero, as in torch's own

    def load_at_once(
        self: cpp.CppVecKernel,
        var: str,
        index: "sympy.Expr",
        dtype: torch.dtype,
        load_mask: "CppCSEVariable | None" = None,
    ) -> str:
        load = loads.get(self.num_elems * dtype.itemsize) if isinstance(self.num_elems, int) else None
        if load is None or load_mask or dtype not in narrow or str(self.vec_isa) != "avx2":
            return load_line(self, var, index, dtype, load_mask)
        place = f"reinterpret_cast<const __m128i*>({var} + {cpp.cexpr_index(index)})"
        return f"{self._get_vec_type(dtype)}(_mm256_zextsi128_si256({load}({place})))"

    yield cls, "_get_vec_load_line", load_at_once


@changing(
    "torch._inductor.dtype_propagation",
    "Inductor fills its table of dtype rules, a singleton, again for every operation of every kernel, which takes "
    "0.2 ms each time",
)
def tables_of_dtype_rules() -> Changes:
    from torch._inductor import dtype_propagation

    cls = dtype_propagation.DtypePropagationOpsHandler
    fill = cls.__init__
    filled: tuple[int, int] | None = None

    def fill_once(self: dtype_propagation.DtypePropagationOpsHandler) -> None:
        from torch._inductor.codegen.common import pointwise_overrides_data
        from torch._inductor.utils import op_dtype_propagation_rules

        nonlocal filled
        sizes = len(op_dtype_propagation_rules), len(pointwise_overrides_data)
        if filled != sizes:
            fill(self)
            filled = sizes

    yield cls, "__init__", fill_once


apply_needed()
