"""Layers that compute in low precision, and train in it.

contexts.py     which scheme a layer computes in
static.py       scales that are calibrated or learned
delayed.py      scales from the amaxes of earlier steps
layer.py        base class of layers; stored.py: how they store and load weights
layers.py       Linear, Embedding; transforms.py: transforms of Linear's input
convolutions.py Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
functions.py    LayerNorm, RMSNorm, GELU, SiLU, Sigmoid, Tanh, Hardswish, Hardsigmoid, LeakyReLU, Softmax
attention.py    MultiheadAttention; masks.py merges its masks
kv_cache.py     KVCache: keys and values as codes
kinds.py        which quantized layer replaces which float module
conversion.py   convert a float model, and back
calibration.py  find static scales from data
report.py       how each parameter of a model was handled
folded.py       batch norms that layers compute; folding.py finds them
freezing.py     replace weights by codes
reminder.py     warns about a model that was not frozen
sharing.py      quantize an input of several layers once; siblings.py finds such layers
quantizing.py   hop.quantize_: all steps in one call
holding.py      keep the codes of weights over microbatches
schedule.py     train in stages
master.py       float weights that FSDP2 gathers as codes; gathering.py prepares a model
"""

from torch import nn as _nn

from hop.nn.attention.kv_cache import KVCache as KVCache
from hop.nn.attention.multihead import MultiheadAttention as MultiheadAttention
from hop.nn.contexts import same_scheme as same_scheme
from hop.nn.contexts import scheme as scheme
from hop.nn.layers.base import Layer as Layer
from hop.nn.layers.base import not_a_model as not_a_model
from hop.nn.layers.convolutions import Conv1d as Conv1d
from hop.nn.layers.convolutions import Conv2d as Conv2d
from hop.nn.layers.convolutions import Conv3d as Conv3d
from hop.nn.layers.convolutions import ConvTranspose1d as ConvTranspose1d
from hop.nn.layers.convolutions import ConvTranspose2d as ConvTranspose2d
from hop.nn.layers.convolutions import ConvTranspose3d as ConvTranspose3d
from hop.nn.layers.functions import GELU as GELU
from hop.nn.layers.functions import Hardsigmoid as Hardsigmoid
from hop.nn.layers.functions import Hardswish as Hardswish
from hop.nn.layers.functions import LayerNorm as LayerNorm
from hop.nn.layers.functions import LeakyReLU as LeakyReLU
from hop.nn.layers.functions import RMSNorm as RMSNorm
from hop.nn.layers.functions import Sigmoid as Sigmoid
from hop.nn.layers.functions import SiLU as SiLU
from hop.nn.layers.functions import Softmax as Softmax
from hop.nn.layers.functions import Tanh as Tanh
from hop.nn.layers.linear import Embedding as Embedding
from hop.nn.layers.linear import Linear as Linear
from hop.nn.models.calibration import calibrate as calibrate
from hop.nn.models.conversion import convert as convert
from hop.nn.models.conversion import float_state_dict as float_state_dict
from hop.nn.models.folding import fold_batch_norms as fold_batch_norms
from hop.nn.models.folding import freeze_statistics_ as freeze_statistics_
from hop.nn.models.freezing import freeze as freeze
from hop.nn.models.gathering import bytes_gathered as bytes_gathered
from hop.nn.models.gathering import gather_as_codes as gather_as_codes
from hop.nn.models.holding import hold_weights as hold_weights
from hop.nn.models.schedule import Schedule as Schedule
from hop.nn.models.schedule import Stage as Stage
from hop.nn.models.siblings import share_input as share_input
from hop.nn.scales.delayed import AmaxHistory as AmaxHistory
from hop.nn.scales.delayed import advance as advance
from hop.nn.scales.delayed import advance_after as advance_after
from hop.nn.scales.static import StaticScale as StaticScale
from hop.nn.weights.loading import load_state_dict as load_state_dict

__all__ = [
    "GELU",
    "AmaxHistory",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Embedding",
    "Hardsigmoid",
    "Hardswish",
    "KVCache",
    "Layer",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "Schedule",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Stage",
    "StaticScale",
    "Tanh",
    "advance",
    "advance_after",
    "bytes_gathered",
    "calibrate",
    "convert",
    "float_state_dict",
    "fold_batch_norms",
    "freeze",
    "freeze_statistics_",
    "gather_as_codes",
    "hold_weights",
    "load_state_dict",
    "prepare",
    "same_scheme",
    "scheme",
    "share_input",
]


def prepare(model: _nn.Module) -> None:
    """Build the scale state that the active scheme needs, in all layers of `model`.

    Compiled programs cannot do so themselves. In eager mode layers do it in their forward.
    """
    if not isinstance(model, _nn.Module):
        raise not_a_model("prepare", model)
    for module in model.modules():
        if isinstance(module, Layer):
            module.prepare()
