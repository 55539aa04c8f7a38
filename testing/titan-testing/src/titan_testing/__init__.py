"""What the tests of every titan package share: gloo ranks in a fifth of a second, seeds, tolerances, GPU skips.

`run_ranks(fn, n)` runs a module-level function on ``n`` gloo ranks forked from a server that has already imported
torch. See `titan_testing.ranks` for how, and why not torchrun. `titan_testing.device_rules` runs ranks by NCCL's and CUDA's
rules instead, and reports what would hang or race.
"""

from titan_testing.compare import assert_close, max_abs_error, tolerance
from titan_testing.ranks import RankFailure, RankTimeout, preload, run_ranks
from titan_testing.seeds import seed_everything

__all__ = [
    "RankFailure",
    "RankTimeout",
    "assert_close",
    "max_abs_error",
    "preload",
    "run_ranks",
    "seed_everything",
    "tolerance",
]
