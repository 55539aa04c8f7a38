"""Steps whose gradient is far larger than usual are left out, on every rank alike and without another host sync.

A few batches can throw a run off: their gradient is many times the usual, and clipping keeps its direction. Here a step is left
out whose gradient norm exceeds the mean of the last ones by k standard deviations. The threshold comes from earlier steps, so
it is a number on the host before the step begins; whether the norm exceeds it is decided on the device with the flag that also
leaves out steps that are not finite, and the host reads it with the loss. All ranks have the bits of the same norms.

Where many steps in a row are left out, it is no single batch: the gradient has a new scale, or the weights are bad. Then the run
goes back to an older checkpoint and on with the data after the spike (PaLM, arXiv:2204.02311, section 5.1), or takes the new
scale as the usual one.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from titan_train.config.recipe import SpikesConfig


class Spikes:
    """The norms of the last steps that were made, and the steps left out since."""

    def __init__(self, config: SpikesConfig) -> None:
        """No step is made yet."""
        self._config = config
        self.sigma = config.sigma
        self._norms: deque[float] = deque(maxlen=config.window)
        self.in_a_row = 0
        """Spikes since the last step that was made."""
        self.lasting = 0
        """Steps since then, from the first spike on: others may be left out between spikes, being not finite."""
        self.limit = math.inf
        """The norm beyond which the next step is left out, a float32 number."""
        self.rewinds = 0
        """How often the run went back since it last came past a spike."""
        self.worst = 0
        """The latest step at which it did."""

    def note(self, grad_norm: float, *, skipped: bool) -> bool:
        """Count a step that is done; whether it was a spike.

        Args:
            grad_norm: Of the whole gradient before clipping; the same bits on every rank.
            skipped: The step changed nothing, for whatever reason.
        """
        spike = skipped and math.isfinite(grad_norm) and grad_norm > self.limit
        self.in_a_row += spike
        if self.in_a_row:
            self.lasting += 1
        if not skipped:
            self.in_a_row = self.lasting = 0
            self._norms.append(grad_norm)
            self._set_limit()
        return spike

    @property
    def exhausted(self) -> bool:
        """So many steps in a row were left out that it is not their data alone."""
        return self.in_a_row >= self._config.most

    def forget(self, *, norms: bool) -> None:
        """Go on after many spikes; with ``norms`` what was usual before is so no more."""
        self.in_a_row = self.lasting = 0
        if norms:
            self._norms.clear()
            self._set_limit()

    def went_back(self, step: int) -> int:
        """Count that the run went back at ``step``. Returns how often it did since it last came past a spike."""
        self.rewinds = self.rewinds + 1 if step <= self.worst else 1
        self.worst = max(self.worst, step)
        return self.rewinds

    def state_dict(self) -> dict[str, Any]:
        """Plain data; empty if no step is ever left out."""
        if not self._config.sigma:
            return {}
        return {"in_a_row": self.in_a_row, "lasting": self.lasting, "norms": list(self._norms)}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[float]) -> None:
        """Continue from a saved state; an older version's is a list, of spikes in a row and the norms."""
        if not isinstance(state, Mapping):
            count, *norms = state or [0.0]
            state = {"in_a_row": count, "lasting": count, "norms": norms}
        self.in_a_row, self.lasting = int(state.get("in_a_row", 0)), int(state.get("lasting", 0))
        self._norms = deque(state.get("norms", ()), maxlen=self._config.window)
        self._set_limit()

    def _set_limit(self) -> None:
        norms = list(self._norms)
        full = bool(self._config.sigma) and len(norms) == self._config.window
        limit = statistics.fmean(norms) + self._config.sigma * statistics.pstdev(norms) if full else math.inf
        self.limit = float(torch.tensor(limit, dtype=torch.float32))  # the device compares in float32
