"""The agent of one machine: `agent` forks that machine's ranks from a server that has imported torch, passes orders on, reads
heartbeats and reports how ranks end. `preload` is what the server imports, once for all ranks.
"""
