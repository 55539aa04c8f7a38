"""Text that is tokenized while a run trains on it: for corpora that are too large to prepare.

A stream is the tokens of all documents in the order of the files, again and again. It is cut into blocks of
`stream_window` samples. A block is made when a rank first needs it, by one process of the machine (or of all that share the
cache folder), and kept on disk as a shard until it lies well behind; every process reads it through a memory map, so memory
and disk do not grow with the corpus.

Where a block begins is a handful of values: the pass, the file, the line, and how many of that document's tokens the block
before took. With the number of samples they are the state of a run. A sample's number gives its block and, by a permutation
of the block, its window; no rank, process or thread count enters. So a run resumes at any step on any number of ranks with
the same samples, and another machine without the cache makes the same blocks.

- `reader`: documents from a cursor, where a block begins, on. `blocks`: blocks on disk, made once.
- `token_stream`: one source as samples.
"""
