"""Where steps lie: a file system, or a store that fsspec reaches.

`paths`: the protocol, and paths of both kinds. `files`: write a file and bring it to disk.
"""
