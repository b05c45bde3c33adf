"""Compare programs with other runtimes node by node, and write test vectors.

verify.py   verify: a program and another program, or a file that another runtime runs
beside.py   the comparison of a program with a file, node by node
trials.py   which convention reproduces a runtime's codes
litert.py, micro.py, qoperator.py, tosa.py, reference_model.py      the runtimes
arrays.py   the inputs, sums and outputs of a node, as arrays
vectors.py  vectors: a folder with the arrays of all nodes
files/      the README and the readers in Python and C of such a folder
"""
