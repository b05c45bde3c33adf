"""Families of operators: the Meaning of each, in one file per family or group of similar families."""
