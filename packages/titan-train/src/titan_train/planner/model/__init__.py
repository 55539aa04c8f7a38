"""What a model is made of, for the planner: shapes, parameters, products, FLOPs. No torch.

`shape` the vocabulary (attention, dense and routed feed-forward, state space), `families` the shapes known by name,
`products` the matrix products of one block, `flops` FLOPs per token by convention.
"""
