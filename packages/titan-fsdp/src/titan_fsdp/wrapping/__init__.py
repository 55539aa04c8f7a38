"""Carrying a plan out.

- `apply`: inner units first, the root last; `borders`: dtypes at the borders of units with several modules.
- `prefetch`, `compress`: torch's settings for overlap and for gradients on the wire. `powersgd`: with state that can be saved.
- `checks`: misuse that torch lets pass, caught before step 1.
"""
