"""Blocks that model families share.

- `attention`: causal attention over packed documents, in one replaceable module.
- `blocks`: decoder layer, grouped-query attention, SwiGLU.
- `decoder`: embedding, layers, norm and head, from a list of layers.
- `rope`: rotary positions.
- `shared_input`: several linears that read one input.
- `tensor_styles`: the words in which a family says how its modules are sharded by tensor parallelism.
"""
