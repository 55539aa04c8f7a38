"""Seconds: `constants` efficiencies and their sources, `products` one matrix product, `links` one collective on the link that
its group spans, `block` one block's passes by operator, `schedules` a pipeline's bubble, `step` the whole optimizer step by
term. `traffic` counts the transfers behind them, and their bytes, by axis.
"""
