"""Algorithms that choose the codes and scales of a model from data, for any Quantizer.

gptq.py     codes of weights with the least error of a layer's results; solving.py finds those of one weight
inputs.py   what passes into layers: their order, their inputs, second moments of these
"""

from hop.algorithms.gptq import GPTQ as GPTQ
from hop.algorithms.gptq import LayerError as LayerError
from hop.algorithms.gptq import gptq as gptq

__all__ = ["GPTQ", "LayerError", "gptq"]
