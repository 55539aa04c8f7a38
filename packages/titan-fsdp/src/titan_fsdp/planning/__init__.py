"""From a model, sizes and a policy to a plan. Pure: no rank, no collective, no change of the model.

- `policy`: what the user decides; `units`: which modules form a unit; `fp32`: units kept in float32.
- `decide`: parameters, dtypes and shard dims of each unit; `data`: the plan as plain values.
- `collectives`: counts and bytes of a step, in closed form; `estimate`: its memory; `explain`: the table.
"""
