"""What runs in each rank, and what connects the rank to its node's agent.

`worker` joins the process group, trains and leaves. `info` says which rank this is, `device` selects its GPU, `environment`
checks the variables by which ranks meet. `monitor` writes the `heartbeat` and tightens time-outs; `inject` carries out planned
faults. `descriptors` raises the limit of open files. `orders` arrive through a pipe. `failure` and `flight_recorder` record what
went wrong, for the supervisor to read.
"""
