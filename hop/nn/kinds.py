"""Which layer takes the place of which."""

from typing import Any

from torch import nn

from hop.nn.attention import MultiheadAttention, OutputProjection
from hop.nn.convolutions import CONVOLUTIONS
from hop.nn.layers import Embedding, Linear

LAYERS: dict[type[nn.Module], Any] = {
    **{layer.float_type: layer for layer in (Linear, Embedding, OutputProjection, *CONVOLUTIONS)},
    nn.MultiheadAttention: MultiheadAttention,
}
"""From a float layer to the quantized one."""

LEFT: dict[type[nn.Module], str] = {
    nn.RNNBase: "its products are inside one operator of PyTorch for all time steps, and hop has none for it; "
    "to quantize them, write the recurrence with Linear layers",
    nn.RNNCellBase: "its products are inside one operator of PyTorch, and hop has none for it; to quantize them, write "
    "the cell with Linear layers",
}
"""Modules whose own parameters are weights of products, and why they stay in floats."""
