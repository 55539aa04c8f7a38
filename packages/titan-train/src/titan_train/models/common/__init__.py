"""Blocks that model families share.

- `attention`: causal attention over packed documents, in one replaceable module.
- `blocks`: decoder layer, grouped-query attention, SwiGLU.
- `delta`: gated delta net, a layer with a state instead of keys and values.
- `decoder`: embedding, layers, norm and head, from a list of layers.
- `args`: the arguments of a mixture of experts, and checks that relate two arguments of a model.
- `hf`: what a family says about its checkpoints on Hugging Face; a published ``config.json`` read field by field.
- ``moe/``: mixture of experts.
- `loss`: cross-entropy as a sum over tokens.
- `packed`: attention inside packed documents; `windowed`: within a window; `sinks`: with a learned logit per head.
- `rope`: rotary positions.
- `shared_input`: several linears that read one input.
- `tensor_styles`: the words in which a family says how its modules are sharded by tensor parallelism.
"""
