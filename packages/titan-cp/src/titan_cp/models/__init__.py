"""Context parallelism inside a model.

- `module`: `CPAttention` and `apply_context_parallel`.
- `flex`: masks of FlexAttention, seen from one rank.
"""
