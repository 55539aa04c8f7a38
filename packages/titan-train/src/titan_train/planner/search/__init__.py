"""From a model, a machine and a number of devices to setups: `space` enumerates what is legal, `search` estimates and
ranks, `reasons` says in one sentence why one setup beats another, `refuse` what stands in the way when none fits.
"""
