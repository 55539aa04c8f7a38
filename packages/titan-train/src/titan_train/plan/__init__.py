"""What a configuration means on a number of ranks, decided before any rank starts. Pure arithmetic: no torch.

`layout` maps the degrees to ranks, `batch` divides the global batch, `schedule` picks the pipeline's schedule,
`placement` keeps tensor-parallel groups inside a node, `trial` shortens the warm-up of a short run. `run.plan_run`
decides all that depends on the number of ranks, so that a bad number is one error at the terminal, not one per rank.
"""
