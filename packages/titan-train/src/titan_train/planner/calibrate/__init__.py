"""Fitting the constants: `rows` reads published measurements, `fit` replaces few constants by measured ones, `software`
has the factors of other stacks and the interval, `defaults` what `plan` and `check` use, `runs` a fit to runs of one's own.
"""
