"""The supervisor of a run: one loop over all attempts, whichever launcher starts the ranks.

`supervisor` runs the loop. It asks `watch` for hangs and slow ranks, `elastic` for a layout that fits the ranks that
are left, and `restarts` whether to start again.
"""
