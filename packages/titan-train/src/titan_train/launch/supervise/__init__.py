"""The supervisor of a run: one loop over all attempts, whichever launcher starts the ranks.

`supervisor` runs the loop; `attempt` watches one attempt. `watch` detects hangs and slow ranks, `elastic` finds a layout
for the ranks that are left, `restarts` decides whether to start again. `requests` are signals from a person or a batch
system; `journal` reports to the person and writes ``attempts.jsonl``.
"""
