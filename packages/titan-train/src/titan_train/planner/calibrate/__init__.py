"""Fitting the constants: `fit` replaces few constants by measured ones, `defaults` has what `plan` and `check` use and the
interval, `runs` a fit to runs of one's own.
"""
