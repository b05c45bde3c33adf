"""Optimizers with quantized states and the arguments of torch.optim.

states.py                which states are quantized, and by which quantizer
updates.py               the update rules, as functions of float32 tensors
rounding.py              stochastic rounding of float32 to bfloat16
step.py                  the operator that a step calls
optimizer.py             the base class: states, steps, and state_dict
optimizers.py            AdamW, Adam, SGD, Lion
loading.py               checks of a state_dict before it is loaded
torchao_states.py        import of states of torchao.optim
bitsandbytes_states.py   import and export of states of bitsandbytes.optim
"""

from hop.optim.bitsandbytes_states import bitsandbytes_state as bitsandbytes_state
from hop.optim.bitsandbytes_states import load_bitsandbytes_state as load_bitsandbytes_state
from hop.optim.optimizers import SGD as SGD
from hop.optim.optimizers import Adam as Adam
from hop.optim.optimizers import AdamW as AdamW
from hop.optim.optimizers import AdamW4bit as AdamW4bit
from hop.optim.optimizers import AdamW8bit as AdamW8bit
from hop.optim.optimizers import AdamWFp8 as AdamWFp8
from hop.optim.optimizers import Lion as Lion
from hop.optim.states import BITS4 as BITS4
from hop.optim.states import BITS8 as BITS8
from hop.optim.states import BITS8_FP8 as BITS8_FP8
from hop.optim.states import FP8 as FP8
from hop.optim.torchao_states import load_torchao_state as load_torchao_state

__all__ = [
    "BITS4",
    "BITS8",
    "BITS8_FP8",
    "FP8",
    "SGD",
    "Adam",
    "AdamW",
    "AdamW4bit",
    "AdamW8bit",
    "AdamWFp8",
    "Lion",
    "bitsandbytes_state",
    "load_bitsandbytes_state",
    "load_torchao_state",
]
