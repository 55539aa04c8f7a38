"""Search the best schedule for unequal costs under a memory limit.

=============  =====================================================================
`search`       `solve` and `pareto`: candidates, search, certificate
`annealing`    simulated annealing over orders
`orders`       decode an order of forwards and gradients into a schedule
`scoring`      makespan, span and memory of a schedule, fast
`exact`        the constraint solver (extra ``titan-pipeline[solve]``)
=============  =====================================================================
"""
