"""Matrix products under autograd.

- `functional`: `linear`, `linears` and `linear_deferred`.
- `linear`: `Float8Linear`, an ``nn.Linear`` that calls them.
- `grouped`: one product per expert.
"""
