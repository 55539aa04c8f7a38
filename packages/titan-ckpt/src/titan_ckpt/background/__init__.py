"""Asynchronous saves: stage the bytes, pass them to the saver process, continue training.

`client`: the trainer's side, with `SaveJob`. `arena`: the staging memory that both processes map. `server`: the saver
process, without torch. `rendezvous`: how the savers of one step wait for each other. `wire`: messages between trainer and
saver.
"""
