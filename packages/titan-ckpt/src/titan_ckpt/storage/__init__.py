"""Where steps are stored: a file system, or a store behind fsspec.

`paths`: paths of both kinds. `files`: write, map, fetch and delete files.
"""
