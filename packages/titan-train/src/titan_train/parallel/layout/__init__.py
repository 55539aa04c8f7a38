"""What a configuration means on a number of ranks, decided before any rank starts. Pure arithmetic: no torch.

`degrees` maps the parallel degrees to ranks and picks the data-parallel wrapping, `batch` divides the global batch, and
`run.plan_run` decides everything, so that a bad number is one error at the terminal, not one per rank.
"""
