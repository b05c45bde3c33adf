"""Programs held against what runs elsewhere, node by node.

arrays.py   what a node reads, sums and gives, as arrays
vectors.py  all nodes of a program in a folder
files/      what lies in such a folder: its README, a reader in Python and one in C
"""
