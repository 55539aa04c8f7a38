"""The folders of steps, without torch: claimed, unfinished, committed, listed, kept or deleted.

`listing`: which steps there are, in the order of their commits. `commit`: begin a save, commit it, delete what is not
kept. `leftovers`: what crashed saves and deletions left. `retention`: which steps to keep. `claim`: one trainer per
folder, and whether a process still runs. `turns`: one commit at a time in a store.
"""
