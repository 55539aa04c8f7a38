"""Starting ranks, watching them, and starting them again.

Who starts them: `local` (forked on this machine), `torchrun` (with `follow` for several machines), `ray` (with
`ray_agent` on each node), `slurm` (writes a batch file). All are a `job.Launcher` to the one loop in `supervisor`, which
decides with `restarts` (again or not), `watch` (hang, slow rank), `elastic` (fewer ranks), `failure` and
`flight_recorder` (what went wrong).

In a rank: `worker` joins, trains, leaves; `monitor` writes the `heartbeat`, lets `faults` strike (`inject`) and tightens
`timeouts`; `orders` come from the launcher. `forked` and `preload` make ranks start in milliseconds; `ranks` says who a
rank is.
"""
