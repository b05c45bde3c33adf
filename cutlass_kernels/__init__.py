"""GPU kernels written in the CuTe DSL: they know torch tensors, dtypes and block sizes, and nothing of hop.

The DSL is an optional dependency (`pip install torch-hop[cuda]`), imported when the first kernel is asked for.
"""

import importlib.util


def missing() -> str | None:
    """Why no kernel of this package can be compiled here, or None."""
    if importlib.util.find_spec("cutlass") is None:
        return "the CuTe DSL is not installed: pip install torch-hop[cuda]"
    return None
