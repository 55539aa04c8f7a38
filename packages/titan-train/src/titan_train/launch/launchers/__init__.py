"""Everything that starts ranks. Each launcher implements `titan_train.launch.job.Launcher`.

`local` forks the ranks on this machine. `torchrun` lets torchrun start them; on several machines, the first one leads
and the others `follow`. `ray/` starts them on the nodes of a Ray cluster. `slurm` writes a batch file.

`forked` and `preload` are the fork server behind `local` and `ray/`: it imports torch once, so a rank starts in
milliseconds.
"""
