"""Rows of torchao, PT2E and torch.ao."""

from tests.support.migrating.row import NONE, Library, Row

_IMPORTS = """
import torch, torchao
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.mx_formats import *
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict, unflatten_tensor_state_dict
from torchao.quantization import *
from torchao.quantization.granularity import *
from torchao.quantization.qat import IntxFakeQuantizeConfig, IntxFakeQuantizer, QATConfig
from safetensors.torch import load_file, save_file
""".strip()

_LOWEST = ("their.model[0].weight.qdata.min() == -128", "codes(our.model[0].weight).min() == -127")
_EQUAL = "torch.equal(numbers(their.model[0].weight), numbers(our.model[0].weight))"
_SEARCHED = (
    "torch.allclose(their.model[0].weight.scale.amax(1) * 7.5, their.w.abs().amax(1))",
    "(numbers(our.model[0].weight) - our.w).norm() < (numbers(their.model[0].weight) - their.w).norm()",
)
_8DA4W = "Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4)"

WEIGHTS = (
    Row(
        "quantize_(model, Int8DynamicActivationInt8WeightConfig())", 'hop.quantize_(model, "int8")',
        "Symmetric, a scale for each row and output channel. Scales: amax / 127.5 in torchao (codes from "
        "-128), amax / 127 in hop (from -127)",
        bound=0.02, size=1.0,
        facts=(*_LOWEST, "torch.allclose(their.model[0].weight.scale[:, 0] * 127.5, their.w.abs().amax(1))",
               "torch.allclose(hop.unpack(our.model[0].weight).scale[:, 0] * 127, our.w.abs().amax(1))"),
    ),
    Row(
        "quantize_(model, Int8DynamicActivationInt8WeightConfig(act_mapping_type=MappingType.ASYMMETRIC))",
        "hop.quantize_(model, hop.Scheme(presets.INT8_ROW_AFFINE, presets.INT8_ROW))",
        "Activation rows have zero points in both; weights as above",
        bound=0.02, size=1.0, facts=_LOWEST,
    ),
    Row(
        "quantize_(model, Int8WeightOnlyConfig())", 'hop.quantize_(model, "int8_weight")',
        "amax / 127.5 in torchao, amax / 127 in hop",
        bound=0.012, size=1.0, facts=_LOWEST,
    ),
    Row(
        "quantize_(model.bfloat16(), Int4WeightOnlyConfig())",
        'hop.quantize_(model.bfloat16(), "int4_weight_128_affine")',
        "Groups of 128 by default in torchao. hop's \"int4\" is symmetric in groups of 32. torchao needs a "
        "GPU",
        result="model(x.bfloat16())", bound=0.1, needs="mslk",
    ),
    Row(
        "quantize_(model, IntxWeightOnlyConfig(torch.int4, PerGroup(32)))", 'hop.quantize_(model, "int4")',
        "Symmetric. torchao: amax / 7.5, one code a byte. hop: scales of least squared error, two codes a byte; "
        'amax / 7 with weights="rule"',
        bound=0.16, size=0.55,
        facts=(*_SEARCHED, "their.model[0].weight.qdata.min() == -8",
               "their.model[0].weight.qdata.dtype == torch.int8"),
    ),
    Row(
        "quantize_(model, IntxWeightOnlyConfig(torch.int4, PerGroup(32), mapping_type=MappingType.ASYMMETRIC))",
        'hop.quantize_(model, "int4_weight_32_affine", weights="rule")',
        "Equal values for float32 weights; hop's default finds scales of less squared error. "
        "For bfloat16 weights torchao's scales are bfloat16, hop's float32",
        bound=1e-6, facts=(_EQUAL, "hop.unpack(our.model[0].weight).quantizer.format.max == 15"),
    ),
    Row(
        f"quantize_(model, {_8DA4W})", 'hop.quantize_(model, "8da4w")',
        "Weight scales: amax / 7.5 in torchao, of least squared error in hop",
        bound=0.16, size=0.55, facts=_SEARCHED,
    ),
    Row(
        "quantize_(model, Float8WeightOnlyConfig())", 'hop.quantize_(model, "fp8_weight")',
        "Equal codes",
        bound=1e-6, size=1.0,
        facts=("torch.equal(their.model[0].weight.qdata.float(), codes(our.model[0].weight).float())",),
    ),
    Row(
        "quantize_(model.bfloat16(), Float8DynamicActivationFloat8WeightConfig(granularity=PerTensor()))",
        'hop.quantize_(model.bfloat16(), "fp8_dynamic_tensor")',
        "torchao needs a GPU with fp8",
        result="model(x.bfloat16())", bound=0.02, needs="cuda",
    ),
    Row(
        "quantize_(model.bfloat16(), Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))",
        'hop.quantize_(model.bfloat16(), "fp8")',
        "hop's \"fp8\" is by row. torchao needs a GPU and bfloat16",
        result="model(x.bfloat16())", bound=0.02, needs="cuda",
    ),
    Row(
        "y = Float8Tensor.from_hp(w, granularity=PerTensor())", "y = hop.quantize(presets.FP8_TENSOR, w)",
        "Equal codes", result="numbers(y)", bound=1e-7,
        facts=("torch.equal(their.y.qdata.float(), our.y.codes.float())",),
    ),
    Row(
        "y = Float8Tensor.from_hp(w, granularity=PerRow())", "y = hop.quantize(presets.FP8_ROW, w)",
        "Equal codes", result="numbers(y)", bound=1e-7,
        facts=("torch.equal(their.y.qdata.float(), our.y.codes.float())",),
    ),
    Row(
        "quantize_(model.bfloat16(), MXDynamicActivationMXWeightConfig())",
        'hop.quantize_(model.bfloat16(), "mxfp8")',
        "Equal values: both round scales up (RCEIL). torchao's product needs bfloat16 and a Blackwell GPU",
        result="weights(model)", facts=("torch.equal(numbers(their.model[2].weight), numbers(our.model[2].weight))",),
    ),
    Row(
        "y = MXTensor.to_mx(w.bfloat16(), torch.float8_e4m3fn)",
        'y = hop.quantize(hop.Quantizer(presets.MXFP8.format, (1, 32), '
        'hop.scale_rules.Microscaling(rounding="floor")), '
        "w.bfloat16())",
        "`to_mx` rounds scales down by default (FLOOR), `presets.MXFP8` up",
        result="numbers(y)",
    ),
    Row(
        "quantize_(model, NVFP4WeightOnlyConfig())", 'hop.quantize_(model, "nvfp4_weight", weights="rule")',
        "Equal values, except in blocks with amax 0 or below 2^-6 of the largest scale; hop's default finds scales of "
        "less squared error",
        bound=1e-6, facts=(_EQUAL,),
    ),
    Row(
        "quantize_(model.bfloat16(), NVFP4DynamicActivationNVFP4WeightConfig())",
        'hop.quantize_(model.bfloat16(), "nvfp4")',
        "torchao needs a Blackwell GPU", result="model(x.bfloat16())", bound=0.05,
        needs="blackwell",
    ),
)  # fmt: skip

CHOICES = (
    Row(
        'quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, fqn: fqn == "0")',
        'hop.quantize_(model, "int8_weight", filter=lambda name, module: name != "2")',
        "torchao passes (module, name) for every module; hop passes (name, module) for layers, and also "
        "accepts a pattern or a type",
        bound=0.012, facts=("their.converted(their.model) == our.converted(our.model) == ['0']",),
    ),
    Row(
        "quantize_(mixed, Int8WeightOnlyConfig())", 'hop.quantize_(mixed, "int8_weight", filter=torch.nn.Linear)',
        "By default torchao converts Linear only, hop also embeddings and convolutions",
        result="numbers(mixed.linear.weight)", bound=0.012,
        facts=("their.converted(their.mixed) == our.converted(our.mixed) == ['linear']",
               "their.converted(hop.quantize_(their.Mixed(), 'int8_weight')) == ['table', 'linear', 'conv']"),
    ),
    Row(
        'quantize_(model, FqnToConfig({"0": Int8WeightOnlyConfig(), "2": None}), filter_fn=None)',
        'hop.quantize_(model, {"0": "int8_weight", "*": None})',
        "In hop the first matching pattern wins, and a pattern without a match raises",
        bound=0.012, facts=("their.converted(their.model) == our.converted(our.model) == ['0']",),
    ),
    Row(
        "quantize_(model, Int8WeightOnlyConfig()); tensors, metadata = flatten_tensor_state_dict(model.state_dict()); "
        'save_file(tensors, file, metadata); y = unflatten_tensor_state_dict(load_file(file), metadata)[0]["0.weight"]',
        'hop.quantize_(model, "int8_weight"); hop.storage.save_file(model.state_dict(), file); '
        'y = hop.storage.load_file(file)["0.weight"]',
        "The files are not interchangeable",
        result="numbers(y)", bound=0.012,
    ),
)  # fmt: skip

TRAINING = (
    Row(
        f'quantize_(model, QATConfig({_8DA4W}, step="prepare"))', 'hop.nn.convert(model, "8da4w")',
        "torchao computes with fake-quantized floats, hop with codes. Straight-through gradients in both",
        result="gradients(model, x)", bound=0.2,
    ),
    Row(
        f'quantize_(model, QATConfig({_8DA4W}, step="prepare")); quantize_(model, QATConfig({_8DA4W}, step="convert"))',
        'hop.nn.convert(model, "8da4w"); hop.nn.freeze(model)',
        "hop freezes the scheme that was trained", bound=0.16, size=0.55,
    ),
    Row(
        'y = IntxFakeQuantizer(IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False))(x)',
        "y = hop.fake_quantize(presets.INT8_ROW_AFFINE, x)",
        "Equal values; a module in torchao, a function in hop", result="y", bound=1e-6,
    ),
    Row(
        "q = IntxFakeQuantizer(IntxFakeQuantizeConfig(torch.int4, group_size=32, is_symmetric=False)); y = q(w)",
        "y = hop.fake_quantize(presets.UINT4_32_AFFINE, w)",
        "Equal scales. torchao 0.18 truncates the zero points of groups, most of them to 0, and clips",
        result="y", bound=0.1,
        facts=("their.q.zero_point.abs().max() <= 1", "hop.quantize(hop.presets.UINT4_32_AFFINE, "
               "their.w).zero_point.max() > 8", "torch.equal(their.q.scale, hop.quantize(hop.presets.UINT4_32_AFFINE, "
               "their.w).scale)"),
    ),
    Row(
        "convert_to_float8_training(model)", "hop.nn.convert(model, recipes.FP8_HYBRID)",
        "Equal arithmetic: e4m3 forward, e5m2 gradients, a scale for the tensor",
        result="gradients(model, x)", bound=1e-5,
    ),
    Row(
        'convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise"))',
        'hop.nn.convert(model, hop.Scheme(presets.FP8_ROW, presets.FP8_ROW, grad=presets.FP8_ROW, '
        'backward="quantized"))',
        "torchao quantizes again for the backward, with power-of-two scales. hop reuses the forward's codes "
        "and multiplies their scales into the gradient",
        result="gradients(model, x)", bound=0.1,
        facts=("their.Float8LinearConfig.from_recipe_name('rowwise').round_scales_to_power_of_2",),
        least=(2, 13),  # their product of rows, on CPUs
    ),
    Row(
        "quantize_(model, Int8MixedPrecisionTrainingConfig())", "hop.nn.convert(model, recipes.INT8_TRAINING)",
        "int8 in all three products. Gradients round stochastically in hop, to nearest in torchao",
        result="gradients(model, x)", bound=0.02,
    ),
    Row(
        "optimizer = torchao.optim.AdamW8bit(model.parameters(), lr=1e-3)",
        "optimizer = hop.optim.AdamW8bit(model.parameters(), lr=1e-3)",
        "Equal codes and scales, except that in hop a positive second moment never rounds to 0",
        result="trained(model, optimizer)", bound=0.002,
    ),
    Row(
        "optimizer = torchao.optim.AdamW4bit(model.parameters(), lr=1e-3)",
        "optimizer = hop.optim.AdamW4bit(model.parameters(), lr=1e-3)",
        "Equal, blocks of 128", result="trained(model, optimizer)", bound=0.002,
    ),
    Row(
        "optimizer = torchao.optim.AdamWFp8(model.parameters(), lr=1e-3)",
        "optimizer = hop.optim.AdamWFp8(model.parameters(), lr=1e-3)",
        "Equal, blocks of 256", result="trained(model, optimizer)", bound=0.002,
    ),
    Row(
        "from torchao.sparsity import semi_sparse_weight, sparsify_; sparsify_(model, semi_sparse_weight())", NONE,
        "hop has no sparse tensors", needs="cuda",
    ),
)  # fmt: skip

_PT2E = """
import torch
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import *
""".strip()
_PREPARE = (
    "quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config({})); "
    "prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer); prepared(x); "
    "model = convert_pt2e(prepared)"
)

PT2E = (
    Row(
        _PREPARE.format(""), 'hop.quantize_(model, "int8_static", calibrate=[x])',
        "PT2E: a graph with float products; uint8 activations, histogram range. hop: layers with integer "
        "products; int8 activations, largest range",
        result="evaluated(model, x)", bound=0.03,
        facts=("'HistogramObserver' in str(their.get_default_x86_inductor_quantization_config().input_activation)",
               "any(n.name.startswith('quantize_per_tensor') and torch.uint8 in n.args "
               "for n in their.model.graph.nodes)"),
    ),
    Row(
        _PREPARE.format(""), "model = hop.export.to_integer(torch.export.export(model, (x,)))[0].module()",
        "Run after PT2E: equal values, with integer products", after=True,
        result="evaluated(model, x)", bound=1e-5,
    ),
    Row(
        _PREPARE.format("is_dynamic=True"), 'hop.quantize_(model, "int8")',
        "Activations: one scale and zero point in PT2E, a symmetric scale for each row in hop",
        result="evaluated(model, x)", bound=0.03,
        facts=("any(n.name.startswith('choose_qparams_tensor') or 'choose_qparams.tensor' in str(n.target) "
               "for n in their.model.graph.nodes)",),
    ),
)  # fmt: skip

TORCH_AO = (
    Row(
        "model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)",
        'hop.quantize_(model, "int8")',
        "torch.ao: one scale per tensor, activations of 7 bits on x86, a copied model. hop: a scale for each "
        "row and channel, in place",
        bound=0.04,
        facts=("their.model[0].weight().qscheme() == torch.per_tensor_affine",
               "torch.allclose(torch.tensor(their.model[0].weight().q_scale() * 127.5), their.w.abs().max())",
               "torch.equal(their.model[0](their.x), torch.ops.quantized.linear_dynamic(their.x, "
               "their.model[0]._packed_params._packed_params, True))"),
    ),
)  # fmt: skip

LIBRARIES = (
    Library("torchao: schemes", "torchao", _IMPORTS, WEIGHTS),
    Library("torchao: which layers, files", "torchao", _IMPORTS, CHOICES),
    Library("torchao: training", "torchao", _IMPORTS, TRAINING),
    Library("PT2E", "torchao", _PT2E, PT2E, least=(2, 13)),
    Library("torch.ao", "torch", "import torch", TORCH_AO),
)
