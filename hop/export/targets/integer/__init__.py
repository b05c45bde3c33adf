"""Code that the integer runtimes share.

values.py     codes in the layouts of a file's tensors
steps.py      a call while it is converted
arguments.py  a call's arguments in the forms that files have
rows.py       one-dimensional convolutions and pools, as two-dimensional ones
constants.py  values of a program that depend on no input
writer.py     conversion of a program node by node
model.py      a file in memory
graph.py      the content of a file
comparing.py  comparison of a program and a file, node by node
trials.py     which convention reproduces a runtime's codes
"""
