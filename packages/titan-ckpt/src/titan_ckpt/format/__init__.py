"""The format on disk, without torch: names, headers, tagged JSON, digests, compression, index and manifest.

`names`: files and folders, limits, JSON of others. `header`: the header of a safetensors file. `digest`: xxh3-128 per
block. `codec`: byte-shuffle and zstd. `tagged_json`: plain Python state as JSON. `boxes`: parts of a tensor, and whether
they cover it. `index`: which bytes of which file are which part of which tensor. `manifest`: what makes a step valid.
`validate`: what JSON must look like before it is used. FORMAT.md describes all of it byte by byte.
"""
