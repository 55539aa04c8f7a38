"""Turning the linear layers of a model into float8 layers.

- `convert`: `convert_to_float8`.
- `patterns`: names of layers, and patterns over them.
- `report`: what was converted, what was not, and why.
- `roofline`: which layers gain from float8.
"""
