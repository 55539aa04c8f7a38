"""Around the step.

- `accumulate`: what is kept between microbatches; `clip`: the gradient norm over mixed meshes.
- `state`: full state dicts, evaluation, resharding; `verify`: the collectives of a real step against the plan.
"""
