"""Stages of a model, and how to cut them.

===============  ===================================================================
`protocol`       what the executor asks of a stage
`torch_stage`    a stage that wraps an ``nn.Module``
`data_parallel`  stages wrapped by FSDP2 or DistributedDataParallel
`tied`           parameters that several stages share
`cut`            a list of layers as stages
===============  ===================================================================
"""
