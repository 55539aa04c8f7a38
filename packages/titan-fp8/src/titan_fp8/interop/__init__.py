"""Calls of other libraries, served by this one.

- `torchao`: its float8 training calls.
"""
