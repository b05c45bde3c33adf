"""Find layers that read one input, and let them quantize it once (sharing.py).

Such layers are query, key and value of an attention, or gate and up projection of a gated MLP. They are found by name.
"""

from collections.abc import Iterable, Sequence

from torch import nn

from hop.nn.layers.linear import Linear
from hop.nn.layers.sharing import SharedInput

SIBLINGS = (
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_lin", "k_lin", "v_lin"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
    ("gate_proj", "up_proj"),
    ("wi_0", "wi_1"),
    ("w1", "w3"),
)
"""Names of sibling layers that read one tensor, as in transformers, diffusers and Llama's own code."""


def share_input(layers: Sequence[Linear]) -> None:
    """Let quantized layers that read one tensor in one forward quantize it once.

    Args:
        layers: hop.nn.Linear layers. In inference mode, where PyTorch does not count changes, nothing may change the
            tensor in place between their calls.

    Raises:
        TypeError: one of them is not a hop.nn.Linear.
    """
    for layer in layers:
        if not isinstance(layer, Linear):
            raise TypeError(f"share_input: layers must be hop.nn.Linear, got {layer!r}; call hop.nn.convert first")
    shared = SharedInput(len(layers))
    for layer in layers:
        layer.shared_input = shared


def siblings(model: nn.Module) -> Iterable[list[nn.Module]]:
    """For each module, the children whose names are in one row of SIBLINGS, if there are at least two."""
    for module in model.modules():
        children = dict(module.named_children())
        for names in SIBLINGS:
            if len(layers := [children[name] for name in names if name in children]) > 1:
                yield layers
