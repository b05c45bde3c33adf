"""Rows of optimum-quanto, bitsandbytes and Transformer Engine."""

from tests.support.migrating.row import NONE, Library, Row

_QUANTO = "import torch\nfrom optimum.quanto import *"
_QINT8 = "quantize(model, weights=qint8); freeze(model)"
_CALIBRATED = (
    "quantize(model, weights=qint8, activations=qint8)\nwith torch.no_grad(), Calibration(): model(x)\nfreeze(model)"
)

QUANTO = (
    Row(
        _QINT8, 'hop.quantize_(model, "int8_weight")',
        "Equal codes. Activations stay in floats",
        result="evaluated(model, x)", bound=1e-5, size=1.0,
        facts=("torch.equal(their.model[0].weight._data, codes(our.model[0].weight))",
               "their.model[0].weight._data.min() == -127"),
    ),
    Row(
        "quantize(model, weights=qfloat8); freeze(model)", 'hop.quantize_(model, "fp8_weight")',
        "Equal codes", result="evaluated(model, x)", bound=1e-5, size=1.0,
        facts=("torch.equal(their.model[0].weight._data.float(), codes(our.model[0].weight).float())",),
    ),
    Row(
        "quantize(model, weights=qint4); freeze(model)", 'hop.quantize_(model, "int4_weight_128_affine")',
        "Groups of 128 in both. quanto has a float shift, hop an integer zero point, so that 0 is exact",
        result="evaluated(model, x)", bound=0.18, size=1.0,
        facts=("their.model[0].weight._group_size == 128", "their.model[0].weight._shift.is_floating_point()"),
    ),
    Row(
        "quantize(model, weights=qint2); freeze(model)",
        "hop.quantize_(model, hop.Quantizer(hop.formats.UINT2, (1, 128), hop.scale_rules.StoredScales(offset=True)))",
        "Groups of 128 with a float offset in both; hop's scales and offsets have 16 bits",
        result="evaluated(model, x)", bound=0.1,
    ),
    Row(
        _CALIBRATED, 'hop.quantize_(model, "int8_static", calibrate=[x])',
        "quanto: symmetric, moving average of ranges, quantizes outputs too. hop: a zero point, largest "
        "range, inputs only",
        result="evaluated(model, x)", bound=0.05, size=1.0, facts=("float(their.model[0].output_scale) > 0",
               "their.Calibration().momentum == 0.9"),
    ),
    Row(
        'quantize(model, weights=qint8, exclude="2"); freeze(model)',
        'hop.quantize_(model, {"2": None, "*": "int8_weight"})',
        "quanto's `include` is hop's `filter`", result="evaluated(model, x)", bound=1e-5,
    ),
    Row(
        "quantize(mixed, weights=qint8); freeze(mixed); norm = torch.nn.Sequential(torch.nn.LayerNorm(8)); "
        "quantize(norm, weights=qint8, activations=qint8)",
        'hop.quantize_(mixed, "int8_weight", filter=lambda name, module: not isinstance(module, torch.nn.Embedding))',
        "quanto skips embeddings, and quantizes LayerNorm's outputs if activations are quantized",
        result="numbers(mixed.linear.weight)", bound=1e-6,
        facts=("type(their.norm[0]).__name__ == 'QLayerNorm'",
               "their.converted(their.mixed) == our.converted(our.mixed) == ['linear', 'conv']",),
    ),
    Row(
        _QINT8 + '; empty = torch.nn.Sequential(torch.nn.Linear(256, 128), torch.nn.ReLU(), torch.nn.Linear(128, 256, '
        "bias=False)); requantize(empty, model.state_dict(), quantization_map(model)); model = empty",
        'saved = hop.quantize_(model, "int8_weight").state_dict(); model = torch.nn.Sequential(torch.nn.Linear(256, '
        '128), '
        "torch.nn.ReLU(), torch.nn.Linear(128, 256, bias=False)); hop.quantize_(model, \"int8_weight\"); "
        "model.load_state_dict(saved)",
        "hop needs no separate quantization map",
        result="evaluated(model, x)", bound=1e-5,
    ),
)  # fmt: skip

_BNB = """
import torch, bitsandbytes as bnb
from bitsandbytes import functional as F
def swap(model, make):
    for name, layer in list(model.named_children()):
        if isinstance(layer, torch.nn.Linear):
            new = make(layer.in_features, layer.out_features, bias=layer.bias is not None)
            new.load_state_dict(layer.state_dict())
            setattr(model, name, new.to(layer.weight.device))
""".strip()
_FP4 = (
    'fp4 = hop.formats.Codebook("fp4", 4, torch.uint8, (-1.0, -2/3, -1/2, -1/3, -1/4, -1/6, -1/192, 0.0, 1/192, 1/6, '
    "1/4, 1/3, 1/2, 2/3, 1.0)); "
)


def _optimizer(theirs: str, ours: str, differs: str, bound: float) -> Row:
    return Row(
        f"optimizer = bnb.optim.{theirs}", f"optimizer = hop.optim.{ours}", differs,
        result="trained(model, optimizer)", bound=bound,
    )  # fmt: skip


_STATES = "Equal codebook, blocks of 256; last bits differ"

BITSANDBYTES = (
    Row(
        "swap(model, lambda *a, **k: bnb.nn.Linear8bitLt(*a, **k, has_fp16_weights=False, threshold=0.0))",
        'hop.quantize_(model, "int8")',
        "bitsandbytes rounds weights to float16 first, so some codes differ by one",
        result="evaluated(model, x)", bound=0.015, size=1.0,
        facts=("(their.model[0].weight.data.int() - codes(our.model[0].weight).int()).abs().max() <= 1",
               "their.model[0].weight.data.min() == -127",
               "torch.equal(their.model[0].weight.data, hop.quantize(hop.presets.INT8_ROW, their.w.half().float())"
               ".codes)"),
    ),
    Row(
        "swap(model, lambda *a, **k: bnb.nn.Linear8bitLt(*a, **k, has_fp16_weights=False, threshold=6.0))", NONE,
        'hop does not split outlier columns. `{"*.down_proj": None, "*": "int8"}` keeps layers in floats',
        result="evaluated(model, x)",
    ),
    Row(
        "swap(model, lambda *a, **k: bnb.nn.Linear4bit(*a, **k, quant_type=\"nf4\", compute_dtype=torch.float32, "
        "compress_statistics=False))",
        "hop.quantize_(model, hop.Quantizer(hop.formats.NF4, (1, 64)))",
        "Equal codebook. bitsandbytes' blocks of 64 run over the flattened weight, hop's groups along the "
        "inputs",
        result="evaluated(model, x)", bound=1e-5, size=1.0,
    ),
    Row(
        "swap(model, lambda *a, **k: bnb.nn.Linear4bit(*a, **k, quant_type=\"fp4\", compute_dtype=torch.float32, "
        "compress_statistics=False))",
        _FP4 + "hop.quantize_(model, hop.Quantizer(fp4, (1, 64)))",
        "bitsandbytes' fp4 is not e2m1: its least positive value is 1/192. hop's \"mxfp4\" and \"nvfp4\" use "
        "e2m1",
        result="evaluated(model, x)", bound=1e-5, size=1.0,
    ),
    Row(
        "swap(model, lambda *a, **k: bnb.nn.Linear4bit(*a, **k, quant_type=\"nf4\", "
        "compute_dtype=torch.float32))", NONE,
        "hop reads such checkpoints (scales quantized again, the default), but has no scheme for them",
        result="evaluated(model, x)",
    ),
    Row(
        "y = F.dequantize_4bit(*F.quantize_4bit(w, quant_type=\"nf4\"))",
        "y = hop.fake_quantize(hop.Quantizer(hop.formats.NF4, (64,), flat=True), w)",
        "Equal values", result="y",
    ),
    Row(
        "y = F.dequantize_blockwise(*F.quantize_blockwise(w, blocksize=256))",
        "y = hop.fake_quantize(presets.STATE8, w)",
        "Equal codebook and scales; about one code in 500 differs by one, near a tie. bitsandbytes' default "
        "block is 4096",
        result="y", bound=0.01,
        facts=("torch.equal(torch.tensor(hop.formats.DYNAMIC8.numbers), their.F.create_dynamic_map())",
               "their.F.quantize_blockwise(their.w)[1].blocksize == 4096"),
    ),
    _optimizer("AdamW8bit(model.parameters(), lr=1e-3)", "AdamW8bit(model.parameters(), lr=1e-3)",
               _STATES, 0.005),
    _optimizer("Adam8bit(model.parameters(), lr=1e-3)", "Adam(model.parameters(), lr=1e-3)", _STATES, 0.005),
    _optimizer("SGD8bit(model.parameters(), lr=1e-3, momentum=0.9)", "SGD(model.parameters(), lr=1e-3, momentum=0.9)",
               _STATES, 0.005),
    _optimizer("Lion8bit(model.parameters(), lr=1e-4)", "Lion(model.parameters(), lr=1e-4)",
               _STATES + "; so a sign may flip", 0.01),
    Row(
        "optimizer = bnb.optim.PagedAdamW8bit(model.parameters(), lr=1e-3)", NONE,
        "hop has no paged states, LAMB, LARS or percentile clipping", needs="cuda",
    ),
)  # fmt: skip

_TE = """
import torch, transformer_engine.pytorch as te
from transformer_engine.common.recipe import *
model = torch.nn.Sequential(te.Linear(256, 128), torch.nn.ReLU(), te.Linear(128, 256, bias=False)).cuda()
""".strip()


def _recipe(theirs: str, ours: str, differs: str) -> Row:
    return Row(
        f"with te.autocast(recipe={theirs}()): y = model(x.cuda())", f"hop.nn.convert(model, recipes.{ours}); y = "
        f"model(x)",
        differs, result="y.cpu()", bound=0.1, needs="cuda",
    )  # fmt: skip


TRANSFORMER_ENGINE = (
    _recipe("DelayedScaling", "FP8_DELAYED", "Call `hop.nn.advance(model)` after a step; in TE the context does it"),
    _recipe("Float8CurrentScaling", "FP8_HYBRID", "A scale for the tensor, e4m3 forward, e5m2 gradients"),
    _recipe("Float8BlockScaling", "FP8_BLOCKWISE", "1 × 128 for activations and gradients, 128 × 128 for weights"),
    _recipe("MXFP8BlockScaling", "MXFP8_TRAINING", "Blocks of 32 along the sum of each product"),
    _recipe("NVFP4BlockScaling", "NVFP4_TRAINING", "Hadamard transform, 16 × 16 weights, stochastic gradients"),
)  # fmt: skip

LIBRARIES = (
    Library("optimum-quanto", "optimum.quanto", _QUANTO, QUANTO),
    Library("bitsandbytes", "bitsandbytes", _BNB, BITSANDBYTES),
    Library("Transformer Engine", "transformer_engine", _TE, TRANSFORMER_ENGINE),
)
