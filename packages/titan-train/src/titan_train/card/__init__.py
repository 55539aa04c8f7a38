"""A card of a model family: what was proven for it on this machine, with the commands that prove it.

`titan-train card` makes a small model of the same kind, compares it with transformers in one process (`proofs`), trains it under
every layout in turn (`layouts`), predicts the whole model on GPUs, and writes a page and a picture (`page`).
"""
