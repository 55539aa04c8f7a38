"""An FSDP2, HSDP and DDP wrapping policy for any nn.Module: plan, explain, apply, verify."""

from titan_fsdp.names import clean_fqn, named_parameters, unwrap
from titan_fsdp.planning.collectives import Accumulate, Collectives
from titan_fsdp.planning.data import PlannedParam, PlannedUnit, Sizes
from titan_fsdp.planning.estimate import Estimate
from titan_fsdp.planning.policy import Comm, MixedPrecision, Policy, Prefetch, Unit
from titan_fsdp.training.accumulate import accumulate
from titan_fsdp.training.clip import clip_grad_norm_
from titan_fsdp.training.state import eval_mode, full_state_dict, reshard
from titan_fsdp.training.verify import CollectiveCounter, Verification, verify
from titan_fsdp.weights.conventions import Init, conventional_init
from titan_fsdp.weights.materialize import generator_for, materialize
from titan_fsdp.wrap_plan import WrapPlan, plan
from titan_fsdp.wrapping.apply import applied_plan
from titan_fsdp.wrapping.checks import check_optimizer, check_wrapping

__all__ = [
    "Accumulate",
    "CollectiveCounter",
    "Collectives",
    "Comm",
    "Estimate",
    "Init",
    "MixedPrecision",
    "PlannedParam",
    "PlannedUnit",
    "Policy",
    "Prefetch",
    "Sizes",
    "Unit",
    "Verification",
    "WrapPlan",
    "accumulate",
    "applied_plan",
    "check_optimizer",
    "check_wrapping",
    "clean_fqn",
    "clip_grad_norm_",
    "conventional_init",
    "eval_mode",
    "full_state_dict",
    "generator_for",
    "materialize",
    "named_parameters",
    "plan",
    "reshard",
    "unwrap",
    "verify",
]
