"""Expert parallelism: each rank holds some of every layer's experts, and tokens travel to them, none dropped."""

from titan_train.parallel.expert.apply import apply_expert_parallel, check_expert_parallel
from titan_train.parallel.expert.dispatch import ExpertParallelDispatch

__all__ = ["ExpertParallelDispatch", "apply_expert_parallel", "check_expert_parallel"]
