"""Bytes on one rank: `states` parameters, gradients and optimizer, `kept` what forward keeps for backward, `peak` the largest
of the step's instants; `closed` one rank of a model that nothing wraps; all without torch. `ranks` counts the same on the real
model, built on the meta device; `rehearsed` is its activation checkpointing, `folder` a Hugging Face folder's own blocks.
"""
