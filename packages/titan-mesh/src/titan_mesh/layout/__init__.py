"""Rank arithmetic, without torch. In reading order:

- `spec`: parallel degrees and their order, checked against a world size.
- `grid`: ranks on a grid with named axes.
- `topology`: nodes and NVLink domains.
- `ranks`: a spec laid over the ranks of a world: coordinates, groups, flattens, the expert view.
- `layout`: the public `Layout`, which adds `explain`, `validate` and `diff`; `svg` draws it.
"""
