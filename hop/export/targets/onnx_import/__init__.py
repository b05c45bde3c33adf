"""from_onnx: convert ONNX files, of the formats QDQ and QOperator or of floats, to programs.

reading.py    a file's content, validated
calls.py      a node of a file while it is converted
shapes.py     nodes that compute sizes
codes.py      nodes that quantize, dequantize, or compute on codes
products.py   matrix products, convolutions, pools
floats.py     functions of elements, reductions, norms
views.py      rearrangement and selection of elements
plan.py       constant nodes and branches
importing.py  from_onnx
"""

from hop.export.targets.onnx_import.importing import from_onnx as from_onnx
