"""Algorithms that choose a model's codes, scales and schemes from data, for any Quantizer.

gptq.py         gptq, adaround: codes of weights with the least error of a layer's output;
                solving.py (GPTQ) and adarounding.py (AdaRound) handle one weight; grid.py encodes single elements
distilling.py   teacher_of, distillation_loss: the float model as a teacher
choosing.py     choose_bits: a scheme per layer within a size or a time
sensitivity.py  sensitivity: the loss of each layer in each scheme; candidates.py tries the schemes
smoothing.py    smoothquant, awq: channel factors; stages.py groups layers by input, flow.py finds where factors fold
rotating.py     rotate: Hadamard transforms of blocks of channels before quantization
correcting.py   correct_bias, reestimate_batch_norms: corrections after quantization
inputs.py       inputs of layers: call order, sharing, second moments
"""

from hop.algorithms.choosing import choose_bits as choose_bits
from hop.algorithms.correcting import correct_bias as correct_bias
from hop.algorithms.correcting import reestimate_batch_norms as reestimate_batch_norms
from hop.algorithms.distilling import distillation_loss as distillation_loss
from hop.algorithms.distilling import teacher_of as teacher_of
from hop.algorithms.gptq import GPTQ as GPTQ
from hop.algorithms.gptq import AdaRound as AdaRound
from hop.algorithms.gptq import adaround as adaround
from hop.algorithms.gptq import gptq as gptq
from hop.algorithms.rotating import Rotation as Rotation
from hop.algorithms.rotating import rotate as rotate
from hop.algorithms.sensitivity import SQNR as SQNR
from hop.algorithms.sensitivity import Fisher as Fisher
from hop.algorithms.sensitivity import sensitivity as sensitivity
from hop.algorithms.smoothing import AWQ as AWQ
from hop.algorithms.smoothing import SmoothQuant as SmoothQuant
from hop.algorithms.smoothing import awq as awq
from hop.algorithms.smoothing import smoothquant as smoothquant

__all__ = [
    "AWQ",
    "GPTQ",
    "SQNR",
    "AdaRound",
    "Fisher",
    "Rotation",
    "SmoothQuant",
    "adaround",
    "awq",
    "choose_bits",
    "correct_bias",
    "distillation_loss",
    "gptq",
    "reestimate_batch_norms",
    "rotate",
    "sensitivity",
    "smoothquant",
    "teacher_of",
]
