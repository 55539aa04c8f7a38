"""From a model, a machine and a number of devices to setups: `space` enumerates what is legal, `search` estimates and
ranks, `refuse` says what stands in the way when none fits.
"""
