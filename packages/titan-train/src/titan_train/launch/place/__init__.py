"""Where the ranks of a run are placed. Each place implements `titan_train.launch.job.Launcher` with node agents.

`here` has one agent, in the process of the command. `machines` has one in the same command on each machine; they agree through
the run's folder. `ray/` puts one on each node of a Ray cluster. `slurm` writes a batch file.
"""
