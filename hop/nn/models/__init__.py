"""Functions of whole models: convert, calibrate, fold, freeze and report."""
