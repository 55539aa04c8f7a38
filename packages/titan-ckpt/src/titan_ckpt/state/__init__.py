"""The state of a training loop, taken apart into tensors and plain data.

`train_state`: `TrainState` and how it is collected. `model`, `optimizer`: its parts by name. `sharding`: which boxes of a
tensor a rank holds. `leaves`: tensors, arrays and random generators in plain state. `dtypes`: torch and safetensors names.

torch's ``get_state_dict`` is not used. It takes one model instead of a rank's pipeline stages, fails on optimizer state
that belongs to no parameter, and creates missing optimizer state with an optimizer step.
"""
