"""The state of a training loop, taken apart into tensors and plain data, and put back.

`train_state`: `TrainState` and how it is collected. `model`, `optimizer`: its parts. `sharding`: where a rank's part of a
tensor lies in the whole. `leaves`: tensors, arrays and random generators as plain state. `dtypes`: torch and safetensors
names.
"""
