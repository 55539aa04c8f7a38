"""One save, as each rank makes it.

`prepare`: take the state apart and agree on who writes what. `plan`: replicas once, the load balanced, every element
once. `replicas`: warn of replicas that differ. `job`: one rank's part of a save as plain data, and how it is carried
out. `write`: safetensors and JSON files, digested on the way.
"""
