"""Carrying a plan out.

- `apply`: inner units first, the root last; `borders`: dtypes at the borders of units with several modules.
- `prefetch`, `compress`: torch's settings for overlap and for gradients on the wire.
- `checks`: misuse that torch lets pass, caught before step 1.
"""
