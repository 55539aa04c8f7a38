"""Bytes on the fullest rank: `states` parameters, gradients and optimizer, `kept` what forward keeps for backward,
`peak` the largest of the step's instants.
"""
