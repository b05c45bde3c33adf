"""Tables of docs/support.md: files, architectures of GGUF files, and adapters. The rows are those of the library's
tables; a row without an entry here is an error."""

import warnings
from collections.abc import Callable

from hop.integrations import gguf_models
from hop.integrations.gguf_tensors import Layout
from hop.interchange import checkpoints
from hop.interchange.gguf_types import PLAIN, TYPES
from hop.nn.layers.base import Layer
from tests.integrations import gguf_files, test_adapters
from tests.support import pages

YES, NO = "yes", "–"

# What the tests compare values with, bit for bit, by the quant_method.
_ORACLES = {
    "compressed-tensors": "the package compressed-tensors",
    "fp8": "transformers",
    "gptq": "its formula",
    "auto-round": "GPTQ's formula",
    "awq": "its formulas (gemm, gemv, llm-awq)",
    "modelopt": "its formulas",
    "mxfp4": "transformers",
    "bitsandbytes": "its formulas; int8 to two units in the last place",
    "torchao": "the package torchao; Int4Tensor: its formula",
}


def files() -> str:
    """Files of other tools, whether they are read and written, and what tests compare them with."""
    assert _ORACLES.keys() == checkpoints._METHODS.keys(), "a quant_method has no oracle here"
    types = ", ".join(t.name for t in TYPES.values())
    rows = [[f"GGUF: {types}, and {len(PLAIN)} plain types", YES, YES, "the package gguf"]]
    for method, kinds in checkpoints._METHODS.items():
        tensors = "; ".join(" ".join(f"`{end}`" for end in kind.needs if end) for kind in kinds)
        written = YES if method == "compressed-tensors" else NO
        rows.append([f"{method}: {tensors}", YES, written, _ORACLES[method]])
    rows.append(["ONNX in the formats QDQ and QOperator, activations of 8 or 16 bits", YES, YES, "onnxruntime"])
    rows.append([".tflite with int8 codes, or int16 activations", YES, YES, "LiteRT"])
    return pages.table([["file", "read", "written", "same bits as"], *rows])


def architectures() -> str:
    """Architectures of GGUF files, and the models of tests/integrations/gguf_files.py that each is compared with."""
    header = ["general.architecture", "transformers", "what is undone", "compared"]
    rows = []
    models = [(name, name, model) for name, model in gguf_models.MODELS.items()]
    models += [(f"{name}, {what}", model.model_type, model) for name, (what, model, _) in gguf_models.VARIANTS.items()]
    for name, key, model in models:
        layout = model.layout
        undone = [] if layout.rows is Layout._field_defaults["rows"] else ["order of rows"]
        undone += ["norms stored as 1 + w"] if layout.shifted != "$^" else []
        parts = sorted({f"`{join.target.rpartition('}.')[2]}`" for join in layout.joins.values()})
        undone += [f"in parts or transposed: {', '.join(parts)}"] if parts else []
        tested = [each for each in gguf_files.MODELS if each.split(" ")[0] == key]
        assert tested, f"no test writes a file of {name}"
        rows.append([f"`{name}`", f"`{model.model_class}`", "; ".join(undone) or NO, str(len(tested))])
    return pages.table([header, *rows])


def adapters() -> str:
    """PEFT's methods on layers with codes, with the schemes that tests train, merge, unmerge, save and load each in."""
    import peft

    count = len([*test_adapters.SCHEMES, *test_adapters.MORE])
    rows = []
    for method, config in test_adapters.METHODS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(test_adapters.base("int8"), config())
        bases = [m.base_layer for m in model.modules() if hasattr(m, "base_layer") and hasattr(m, "merged_adapters")]
        base = "codes" if all(isinstance(layer, Layer) for layer in bases) else "floats"
        rows.append([method, base, "floats, or codes", "codes, same bits" if base == "codes" else "floats", str(count)])
    return pages.table([["method", "base while it trains", "merged", "unmerged", "schemes tested"], *rows])


TABLES: dict[str, Callable[[], str]] = {": files": files, ": architectures": architectures, ": adapters": adapters}
