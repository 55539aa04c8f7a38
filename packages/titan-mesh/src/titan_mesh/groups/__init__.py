"""From a layout to process groups and `DeviceMesh` objects. Everything that imports torch is here.

- `build`: the public entry; imports torch when it is called.
- `agree`: every rank compares its layout with the others' before the first collective.
- `pool`: process groups, made once for each set of ranks.
- `mesh`: the `Mesh` that hands out axes, flattens and views.
- `torch_private`: the private torch names that are needed, in one place.
"""
