"""Cut a whole model into stages, its own forward unchanged.

===========  =======================================================================
`cutter`     `split`: finds the layers, cuts, checks the parts against the whole
`trace`      one run of the whole model: which module is called when, with what
`place`      how a stage runs the model's forward with only its own part of the model
`absent`     tensors that live on another stage: a shape, a data type and a recipe
===========  =======================================================================
"""
