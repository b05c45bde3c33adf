"""Wrong calls of hop.nn and hop.optim."""

from functools import partial

import torch
from torch import nn

import hop
from hop import presets, schemes
from tests.support.wrong_calls.row import each, floats, int8, wrong

DYNAMIC, STATIC = schemes.INT8_DYNAMIC, schemes.INT8_STATIC
SCHEME = "give one such as hop.schemes.INT8_DYNAMIC"
PARAMETERS = "pass for example model.parameters()"


def model():
    return nn.Sequential(nn.Linear(8, 4))


def converted(scheme=DYNAMIC):
    return hop.nn.convert(model(), scheme)


def parameters():
    return [nn.Parameter(floats(4, 4))]


def adamw(params=None, **options):
    return hop.optim.AdamW(parameters() if params is None else params, **options)


def stepped(grad, **options):
    (p,) = given = parameters()
    p.grad = grad
    adamw(given, **options).step()


def partial_named(function, **options):
    given = partial(function, **options)
    given.__name__ = function.__name__
    return given


layer = partial(hop.nn.Linear, 8, 4)
convert, calibrate = hop.nn.convert, hop.nn.calibrate

LAYERS = [
    *each(wrong, TypeError, f"scheme | must be a hop.Scheme | {SCHEME}", {
        "layer_scheme_text": ("'INT8'", lambda: layer(scheme="INT8")),
        "layer_scheme_none": ("None", lambda: layer(scheme=None)),
        "layer_scheme_quantizer": ("Quantizer(format=int8", lambda: layer(scheme=presets.INT8_ROW)),
        "layer_set_scheme": ("'x'", lambda: setattr(layer(scheme=DYNAMIC), "scheme", "x")),
    }),
    wrong("layer_sparse", ValueError, lambda: hop.nn.Embedding(4, 8, sparse=True, scheme=schemes.INT4_WEIGHT_32),
          "sparse | True | must be False | leave it out"),
    wrong("layer_input_codes", TypeError, lambda: layer(scheme=DYNAMIC)(int8(2, 8)),
          "input | torch.int8 | must be float16, bfloat16, float32 or float64 | cast it, or use hop.out_dtype"),
    wrong("layer_input_list", TypeError, lambda: layer(scheme=DYNAMIC)([[1.0]]),
          "input | [[1.0]] | must be a tensor | make one with torch.tensor"),
    wrong("layer_input_shape", RuntimeError, lambda: layer(scheme=DYNAMIC)(floats(2, 7)),
          "input | (2, 7) | which must be equal | transpose or reshape one of them"),
    wrong("layer_input_device", RuntimeError, lambda: layer(scheme=DYNAMIC)(floats(2, 8).to("meta")),
          "input | meta | must be on one device | move one of them"),
    wrong("layer_not_calibrated", RuntimeError, lambda: layer(scheme=STATIC)(floats(2, 8)),
          "input | is not set | the static scale | call hop.nn.calibrate(model, batches)"),
    wrong("layer_indices", TypeError, lambda: hop.nn.Embedding(4, 8, scheme=schemes.INT4_WEIGHT_32)(floats(2)),
          "indices | torch.float32 | must be int32 or int64 | cast it with .long()"),
    *each(wrong, TypeError, "model | must be a torch.nn.Module | give the model first", {
        "convert_model": ("'x'", lambda: convert("x", DYNAMIC)),
        "convert_class": ("<class", lambda: convert(nn.Linear, DYNAMIC)),
        "quantize_model": ("tensor([[1.", lambda: hop.quantize_(floats(2, 8), "int8")),
    }),
    *each(wrong, TypeError, "rules | must be a hop.Scheme, its name, a Quantizer of weights | give one such as 'int8'",
          {
        "convert_rules_number": ("8", lambda: convert(model(), 8)),
        "convert_rules_empty": ("{}", lambda: convert(model(), {})),
    }),
    *each(wrong, TypeError,
          "rules | must be a hop.Scheme, its name, a Quantizer of weights or None | give one such as 'int8'", {
        "convert_rules_dict": ("1", lambda: convert(model(), {"*": 1})),
        "convert_pair_scheme": ("3", lambda: convert(model(), [("*", 3)])),
    }),
    wrong("convert_name", ValueError, lambda: convert(model(), "int9"),
          "scheme | 'int9' | no scheme is called | use int8"),
    wrong("convert_filter", TypeError, lambda: convert(model(), DYNAMIC, filter=3),
          "filter | 3 | must be a module type, a name pattern or a function | give '*' for all layers"),
    wrong("quantize_name", ValueError, lambda: hop.quantize_(model(), "8da4"),
          "scheme | '8da4' | no scheme is called | use 8da4w"),
    wrong("quantize_static", ValueError, lambda: hop.quantize_(model(), "int8_static"),
          "calibrate | None | has static scales, which are found from data | pass calibrate=batches of inputs"),
    wrong("quantize_pack", TypeError, lambda: hop.quantize_(model(), "int8", pack="no"),
          "pack | 'no' | must be True or False | give one of them"),
    wrong("share_input", TypeError, lambda: hop.nn.share_input([nn.Linear(2, 2)]),
          "layers | Linear(in_features=2 | must be hop.nn.Linear | call hop.nn.convert first"),
    wrong("layer_frozen_weight", RuntimeError, lambda: setattr(hop.quantize_(model(), "int8")[0], "weight",
          nn.Parameter(floats(4, 8))),
          "weight | torch.float32 | is frozen | give a QuantizedTensor"),
    *(
        wrong(
            f"{function.__name__}_model",
            TypeError,
            partial(function, "x"),
            "model | 'x' | must be a torch.nn.Module | give the model first",
        )
        for function in (
            *(hop.nn.freeze, hop.nn.prepare, hop.nn.advance, hop.nn.hold_weights, hop.nn.gather_as_codes),
            *(hop.nn.float_state_dict, partial_named(hop.nn.calibrate, batches=[])),
        )
    ),
    *each(wrong, TypeError, "batches | must be an iterable of batches | give [x], or a DataLoader", {
        "calibrate_none": ("None", lambda: calibrate(converted(STATIC), None)),
        "calibrate_tensor": ("a tensor", lambda: calibrate(converted(STATIC), floats(2, 8))),
    }),
    wrong("calibrate_method", TypeError, lambda: calibrate(converted(STATIC), [floats(2, 8)], method="amax"),
          "method | 'amax' | must be a function | use one of hop.calibration"),
    wrong("calibrate_steps_fraction", TypeError, lambda: calibrate(converted(STATIC), [floats(2, 8)], steps=1.5),
          "steps | 1.5 | must be 1 or more | give None for all batches"),
    wrong("convert_pair", TypeError, lambda: convert(model(), [DYNAMIC]),
          "rules | Scheme(lhs= | must be a pair | give one such as ('*', 'int8')"),
    wrong("convert_selector", TypeError, lambda: convert(model(), [(3, DYNAMIC)]),
          "rules | 3 | must be a module type, a name pattern or a function | give '*' for all layers"),
    wrong("convert_no_layer", ValueError, lambda: convert(model(), [("head*", DYNAMIC)]),
          "rules | 'head*' | no layer matches | leave the rule out, or correct its selector"),
    wrong("calibrate_empty", ValueError, lambda: calibrate(converted(STATIC), []),
          "batches | is empty | must contain an input | give at least one"),
    wrong("calibrate_float_model", ValueError, lambda: calibrate(model(), [floats(2, 8)]),
          "model | Sequential | has no quantized layers | call hop.nn.convert first"),
    wrong("calibrate_steps", ValueError, lambda: calibrate(converted(STATIC), [floats(2, 8)], steps=0),
          "steps | 0 | must be 1 or more | give None for all batches"),
    wrong("freeze_float_model", ValueError, lambda: hop.nn.freeze(model()),
          "model | Sequential | has no quantized layers | call hop.nn.convert(model, scheme) first"),
    wrong("bytes_gathered", ValueError, lambda: hop.nn.bytes_gathered(next(converted().children()), 2),
          "layer | Linear(in_features=8 | must be one that gather_as_codes has prepared | "
          "call hop.nn.gather_as_codes before"),
    wrong("context_text", TypeError, lambda: hop.nn.scheme("INT8"),
          f"choice | 'INT8' | must be a hop.Scheme, or a function | {SCHEME}"),
    wrong("context_choice", TypeError, lambda: hop.nn.scheme(lambda role: "x"),
          "choice | 'x' | must be a Quantizer or None | give one such as hop.presets.INT8_ROW"),
]  # fmt: skip

OPTIMIZERS = [
    *each(wrong, TypeError, f"params | must be an iterable of parameters | {PARAMETERS}", {
        "optimizer_tensor": ("torch.float32", lambda: adamw(floats(2))),
        "optimizer_model": ("Linear(in_features=2", lambda: adamw(nn.Linear(2, 2))),
        "optimizer_none": ("None", lambda: hop.optim.SGD(None)),
    }),
    wrong("optimizer_empty", ValueError, lambda: adamw([]),
          f"params | [] | must contain at least one parameter | {PARAMETERS}"),
    wrong("optimizer_integers", TypeError, lambda: adamw([int8(2)]),
          "params | torch.int8 | must be floating point | pass only trainable parameters"),
    wrong("optimizer_lr", ValueError, lambda: adamw(lr=-1),
          "lr | -1 | must be at least 0 and finite | use such a number"),
    *each(wrong, TypeError, "lr | must be at least 0 and finite | use such a number", {
        "optimizer_lr_text": ("'x'", lambda: adamw(lr="x")),
        "optimizer_lr_none": ("None", lambda: adamw(lr=None)),
    }),
    wrong("optimizer_lr_tensor", ValueError, lambda: adamw(lr=floats(3)),
          "lr | (3,) | must be a number or a tensor of one element | use such a number"),
    wrong("optimizer_beta", ValueError, lambda: adamw(betas=(1.0, 0.9)),
          "betas[0] | 1.0 | must be at least 0 and below 1 | use such a number"),
    *each(wrong, TypeError, "betas | must be two numbers | use such numbers", {
        "optimizer_betas": ("0.9", lambda: adamw(betas=0.9)),
        "optimizer_one_beta": ("(0.9,)", lambda: adamw(betas=(0.9,))),
    }),
    wrong("optimizer_eps", ValueError, lambda: adamw(eps=-1),
          "eps | -1 | must be at least 0 and finite | use such a number"),
    wrong("optimizer_state", TypeError, lambda: adamw(state="BITS8"),
          "state | 'BITS8' | must be a Quantizer | use for example hop.optim.BITS8"),
    wrong("optimizer_state_name", ValueError, lambda: adamw(state={"m": presets.STATE8}),
          "state | 'm' | must be names of states | use one of exp_avg"),
    wrong("optimizer_state_static", ValueError, lambda: adamw(state=presets.INT8_TENSOR_STATIC),
          "state | Static() | must compute its scale and round to the nearest value | use for example hop.optim.BITS8"),
    wrong("optimizer_state_text", TypeError, lambda: adamw(state={"exp_avg": "x"}),
          "state['exp_avg'] | 'x' | must be a Quantizer or None | use for example hop.presets.STATE8"),
    wrong("optimizer_min_numel", ValueError, lambda: adamw(min_numel=1.5),
          "min_numel | 1.5 | must be an integer of at least 0 | use for example 4096"),
    wrong("optimizer_seed", ValueError, lambda: adamw(seed="x"),
          "seed | 'x' | must be an integer | give such a number"),
    wrong("optimizer_flag", ValueError, lambda: adamw(stochastic_rounding="x"),
          "stochastic_rounding | 'x' | must be True or False | give one of them"),
    wrong("optimizer_differentiable", ValueError, lambda: adamw(differentiable=True),
          "differentiable | True | must be False | omit it"),
    wrong("optimizer_nesterov", ValueError, lambda: hop.optim.SGD(parameters(), nesterov=True),
          "nesterov | got 0.0 and 0.0 | needs a momentum above 0 and a dampening of 0 | use such values"),
    wrong("optimizer_sparse", RuntimeError, lambda: stepped(floats(4, 4).to_sparse()),
          "gradient | shape (4, 4) | must be dense | create its layer with sparse=False"),
    wrong("optimizer_infinite", FloatingPointError, lambda: stepped(floats(4, 4) / 0, error_if_nonfinite=True),
          "gradient | shape (4, 4) | must be finite | skip the step"),
    wrong("optimizer_closure", TypeError, lambda: adamw().step(3), "closure | 3 | must be a function | omit it"),
    wrong("optimizer_load", ValueError, lambda: adamw().load_state_dict({"x": 1}),
          "state_dict | ['x'] | must have 'state' and 'param_groups' | pass what an optimizer's state_dict() returns"),
    wrong("optimizer_load_none", TypeError, lambda: adamw().load_state_dict(None),
          "state_dict | None | must have 'state' and 'param_groups' | pass what an optimizer's state_dict() returns"),
    wrong("torchao_optimizer", TypeError, lambda: hop.optim.load_torchao_state(torch.optim.SGD(parameters(), lr=1), {}),
          "optimizer | SGD | must be one of hop.optim | create for example hop.optim.AdamW8bit"),
    wrong("torchao_state", ValueError, lambda: hop.optim.load_torchao_state(adamw(), {"x": 1}),
          "state_dict | ['x'] | must be an optimizer's | pass what an optimizer's state_dict() returns"),
    wrong("bitsandbytes_optimizer", TypeError,
          lambda: hop.optim.load_bitsandbytes_state(torch.optim.SGD(parameters(), lr=1), {}),
          "optimizer | SGD | must be one of hop.optim | create for example hop.optim.AdamW8bit"),
    wrong("bitsandbytes_state", ValueError, lambda: hop.optim.load_bitsandbytes_state(adamw(), {"x": 1}),
          "state_dict | ['x'] | must have 'state' and 'param_groups' | pass what an optimizer's state_dict() returns"),
    wrong("bitsandbytes_write", TypeError, lambda: hop.optim.bitsandbytes_state(torch.optim.SGD(parameters(), lr=1)),
          "optimizer | SGD | must be one of hop.optim | create for example hop.optim.AdamW8bit"),
]  # fmt: skip
