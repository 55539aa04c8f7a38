"""Starting ranks, watching them, and starting them again.

`job` holds the words that all parts share: an attempt, a rank's job, how a rank ended, and the protocols `Launcher` and
`RunningJob`.

`node/` is the agent of one machine: it forks that machine's ranks and sees them end. `place/` decides where agents run: here,
on machines of your own, on the nodes of a Ray cluster; and writes Slurm batch files. `supervise/` owns the attempts of a run: it
watches the ranks and decides whether to start them again, and on how many. `rank/` runs in each rank, with the files and pipes
that connect a rank to its agent. `validate` refuses a configuration before any rank starts.
"""
