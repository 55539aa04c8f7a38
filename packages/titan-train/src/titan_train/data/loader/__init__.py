"""From token sources to the batches of one rank.

- `source`: what every kind of training data brings, and a microbatch of any tensors.
- `rows`: how the tokens of one source become samples: cut anywhere, or whole documents.
- `packed`: samples of a fixed length, each found from its number alone.
- `batch`: one microbatch: tokens, labels, positions, document boundaries.
- `data_loader`: the microbatches of one data-parallel rank, prefetched by a thread.
- `iterated`: the microbatches that a program iterates over, in place of numbered samples.
- `transfer`: copy a batch to its device through pinned memory.
"""
