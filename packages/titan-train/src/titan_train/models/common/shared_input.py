"""Several projections of one input, as one replaceable step.

A model calls ``self.linears(x, self.wq, self.wk, self.wv)`` instead of three linears. By itself that is the same; as
`SharedInput` has no parameters, something outside the model can replace it: tensor parallelism that gathers ``x`` once
while it multiplies, float8 that casts ``x`` once.
"""

from torch import Tensor, nn


class SharedInput(nn.Module):
    """Apply linears to the same input."""

    def forward(self, x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
        """The output of each of ``linears`` for ``x``, in order."""
        return tuple(linear(x) for linear in linears)
