"""Machines as data: one TOML file each, with the source of every figure.

`machine` reads them; `measure` runs products, copies and transfers on the machine at hand and writes such a file.
"""
