"""Programs held against what runs elsewhere, node by node.

verify.py   hop.export.verify: beside another program, or beside a file that its runtime runs
beside.py   a program and a file, node by node; litert.py, micro.py, qoperator.py, tosa.py: the runtimes
arrays.py   what a node reads, sums and gives, as arrays
vectors.py  all nodes of a program in a folder
files/      what lies in such a folder: its README, a reader in Python and one in C
"""
