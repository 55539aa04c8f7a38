"""What runs in each rank, and what connects the rank to its launcher.

`worker` joins the process group, trains and leaves. `info` says which rank this is, `device` selects its GPU. `monitor`
writes the `heartbeat`, injects faults and tightens the `timeouts`. `descriptors` raises the limit of open files. `orders` arrive
through a pipe. `failure` and `flight_recorder` record what went wrong, for the launcher to read.
"""
