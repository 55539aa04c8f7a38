"""One save, on each rank.

`prepare`: take the state apart, agree on the plan, report replicas that differ, save in the trainer's process. `plan`: which
rank writes which box. `job`: one rank's part of a save as plain data, and how it is written and committed. `write`:
safetensors and JSON files, with digests.
"""
