"""Blocks that model families share.

- `attention`: causal attention over packed documents, in one replaceable module.
- `blocks`: decoder layer, grouped-query attention, SwiGLU.
- `decoder`: embedding, layers, norm and head, from a list of layers.
- `hf`, `hf_names`: what a family says about its checkpoints on Hugging Face.
- `hf_config`: read a published ``config.json`` field by field, and compare it with a model's arguments.
- ``moe/``: mixture of experts.
- `loss`: cross-entropy as a sum over tokens.
- `packed`: that attention, document by document.
- `rope`: rotary positions.
- `shared_input`: several linears that read one input.
- `tensor_styles`: the words in which a family says how its modules are sharded by tensor parallelism.
"""
