"""A plan: who holds which tokens, who computes what, and what it costs. Pure; no process group. In reading order:

- `checks`: arguments and document boundaries, refused with the nearest legal choice.
- `layouts`: which tokens each rank holds; `tiles`: which blocks of scores it computes.
- `costs`: bytes sent, kept and buffered, in closed form; `choose`: what ``auto`` means.
- `numbers`: everything above for one plan; `plan`: the public `AttentionPlan` and the function that makes it.
- `steps`: a training step over all ranks of data and context parallelism, against the static layout.
- `tokens`: shard, unshard, positions and labels; `groups`: a process group is checked against the plan.
- `explain` and `draw`: the plan for people.
"""
