"""Split a backward: input gradients now, weight gradients later.

=============  =====================================================================
`engine`       wraps the layers of a stage; explains the idea
`queue`        the weight gradients that wait; adding them to parameters, with their hooks
`rules`        fast rules: linear layers, embeddings, norms
`generic`      split any other operation on a parameter
`functions`    custom autograd functions
`compiled`     compiled regions: `split_backend`
`grouped`      grouped products of a mixture of experts
=============  =====================================================================
"""
