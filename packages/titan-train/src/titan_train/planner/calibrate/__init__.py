"""Fitting the constants: `rows` reads published measurements, `fit` replaces few constants by measured ones, `interval`
turns the errors on rows that were not fitted into an 80 % interval.
"""
