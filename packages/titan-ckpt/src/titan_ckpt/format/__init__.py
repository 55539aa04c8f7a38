"""The format on disk, without torch: names, headers, tagged JSON, digests, compression, index and manifest.

`names`: names of files and folders, limits, the header of a safetensors file. `codec`: block digests, shuffle and zstd.
`tagged_json`: plain Python state as JSON. `boxes`: boxes of a tensor, and whether they cover it. `columns`: many boxes
without an object for each. `index`: where each box of each tensor is stored. `manifest`: what makes a step valid.
`validate`: checks on JSON before it is used. FORMAT.md describes the format byte by byte.
"""
