"""Where steps lie: a file system, or a store that fsspec reaches.

`paths`: paths of both kinds. `files`: write a file and bring it to disk; map or fetch one.
"""
