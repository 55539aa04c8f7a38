"""From meta tensors to initialised weights and buffers.

- `materialize`: allocate, fill and shard; the same weights on any number of ranks.
- `conventions`: a weight init made from the model's own ``reset_parameters`` and ``_init_weights``.
- `buffers`: values of buffers that were built on meta.
- `rebuild`: tensors from a module's own constructor, where its arguments are known.
- `twin`: a copy of a model's structure that such code can run on.
"""
