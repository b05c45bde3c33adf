"""Compare programs with other runtimes node by node, and write test vectors.

arrays.py   the inputs, sums and outputs of a node, as arrays
vectors.py  vectors: a folder with the arrays of all nodes
files/      the README and the readers in Python and C of such a folder
trials.py   which convention reproduces a runtime's codes
tflite.py, qoperator.py, tosa.py                comparisons with files of other runtimes
litert.py, micro.py, reference_model.py         the runtimes
"""
