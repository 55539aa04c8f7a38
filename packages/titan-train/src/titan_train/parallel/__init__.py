"""Parallelism and memory: each kind transforms a plain model in place, on the meta device, before its weights exist.

- ``layout/``: which ranks there are and what each computes, before any rank starts. No torch.
- `apply`: all of it, in the one order that works. Start reading here. `model`: its result. `describe`: lines for the log.
- `check`: what a model cannot do under a layout.
- ``tensor/``, ``expert/``: tensor and sequence parallelism; expert parallelism.
- `context`: each rank computes on its share of every sequence, `context_checks`: what that cannot do.
- `stages`: the pipeline stages of a model. `pipeline`: their executor.
- `data_parallel`: FSDP2, HSDP or DDP around what the others left.
- `float8`, `compiled`: float8 layers, torch.compile. ``activations/``: recomputation and offload.
- `param_shard`: which box of each parameter a rank holds. `gradients`: partial gradients, and the norm over all ranks.
- `structure`: a model's repeated blocks, and what is not trained; `tied`: one weight under several names.
"""
