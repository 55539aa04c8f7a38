"""The format on disk, without torch: names, headers, tagged JSON, digests, compression, index and manifest.

`names`: files and folders, limits, the header of a safetensors file. `codec`: digests of blocks, byte-shuffle and zstd.
`tagged_json`: plain Python state as JSON. `boxes`: parts of a tensor, and whether they cover it. `columns`: many boxes
without an object each. `index`: which bytes of which file are which part of which tensor. `manifest`: what makes a step
valid. `validate`: checks of JSON before it is used. FORMAT.md describes all of it byte by byte.
"""
