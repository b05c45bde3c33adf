"""Matrix products and quantizing on GPUs, in the CuTe DSL and by others' kernels; they know nothing of hop.

The DSL is an optional dependency (`pip install torch-hop[cuda]`), imported when the first kernel is asked for. Kernels
that were built ahead on another machine need none of it: cutlass_kernels.prebuilt.
"""

import functools
import importlib.util


@functools.cache
def missing() -> str | None:
    """Why no kernel can be compiled by the CuTe DSL here, or None; imports nothing."""
    for module, name in (("cutlass", "the CuTe DSL"), ("tvm_ffi", "apache-tvm-ffi, which launches its kernels,")):
        if importlib.util.find_spec(module) is None:
            return f"{name} is not installed: pip install torch-hop[cuda]"
    return None
