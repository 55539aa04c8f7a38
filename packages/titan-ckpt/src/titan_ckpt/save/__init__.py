"""One save, as each rank makes it.

`prepare`: take the state apart, agree on who writes what, warn of replicas that differ. `plan`: replicas once, the load
balanced, every element once. `job`: one rank's part of a save as plain data, and how it is carried out; `now`: that in
this process. `write`: safetensors and JSON files, digested on the way.
"""
