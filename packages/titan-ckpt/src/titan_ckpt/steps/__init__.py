"""The folders of steps, without torch.

`listing`: which steps exist, in the order of their commits. `commit`: begin a save, commit it, delete steps. `leftovers`:
what crashed saves and deletions left behind, and savers whose trainer is gone. `retention`: which steps to keep. `claim`: one
trainer per root, and whether a process is alive.
"""
