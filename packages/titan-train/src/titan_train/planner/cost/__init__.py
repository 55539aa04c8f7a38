"""Seconds of compute: `constants` efficiencies and their sources, `products` one matrix product, `block` one block's
passes by operator, `step` the whole optimizer step by term.
"""
