"""Write golden vectors.

arrays.py   the inputs, sums and outputs of a node, as arrays
vectors.py  vectors: a folder with the arrays of all nodes
files/      the README and the readers in Python and C of such a folder
"""
