"""Ranks on a Ray cluster: one agent per node, which forks the ranks of that node.

`launcher` holds the agents and starts attempts, `job` watches the ranks of one attempt, `agent` is what runs on each
node, `nodes` reserves and replaces nodes, `cluster` connects to Ray.
"""
