"""Starting ranks, watching them, and starting them again.

`job` holds the words that all parts share: an attempt, a rank's job, how a rank ended, and the protocols `Launcher` and
`RunningJob`.

`launchers/` starts ranks: locally, through torchrun, on a Ray cluster; and writes Slurm batch files.
`supervise/` owns the attempts of a run: it watches the ranks and decides whether to start them again, and on how many.
`rank/` is what runs in each rank, and the files and pipes that connect a rank to its launcher.
`testing/` injects the faults of `titan_train.config.faults`. `validate` refuses a configuration before any rank starts.
"""
