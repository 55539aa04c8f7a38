"""Asynchronous saves: stage the bytes, hand them to a process of their own, train on.

`client`: the trainer's side, and the save as the training loop sees it. `arena`: the staging memory that both processes
map. `server`: the saver process, without torch. `rendezvous`: how the savers of one step wait for each other. `wire`:
messages between trainer and saver. `inherited`: savers whose trainer is gone.
"""
