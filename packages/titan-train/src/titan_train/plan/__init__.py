"""What a configuration means on a number of ranks, decided before any rank starts. Pure arithmetic: no torch.

`layout` maps the degrees to ranks, `batch` divides the global batch, `schedule` picks the pipeline's schedule,
`placement` keeps tensor-parallel groups inside a node. `run.plan_run` calls all of them: whatever depends on the number
of ranks is refused here, with one error at the terminal instead of one error per rank.
"""
