"""The schemes that tests cross with layers, operators and routes: one of each kind."""

from hop import recipes, schemes

_DEPLOYED = ("INT8_DYNAMIC", "INT8_STATIC", "INT8_DA_INT4_W", "INT4_WEIGHT_32", "INT8_DA_TERNARY_W")
CROSSED = {**{name: schemes.SCHEMES[name] for name in _DEPLOYED}, **recipes.RECIPES}
EVERY = {**schemes.SCHEMES, **recipes.RECIPES}
