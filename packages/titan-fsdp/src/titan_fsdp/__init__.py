"""An FSDP2, HSDP and DDP wrapping policy for any nn.Module: plan, explain, apply, verify."""

from titan_fsdp._accumulate import accumulate
from titan_fsdp._apply import applied_plan
from titan_fsdp._checks import check_optimizer, check_wrapping
from titan_fsdp._clip import clip_grad_norm_
from titan_fsdp._collectives import Collectives, Keep
from titan_fsdp._estimate import Estimate
from titan_fsdp._materialize import Init, generator_for, materialize
from titan_fsdp._names import clean_fqn, named_parameters, unwrap
from titan_fsdp._plan import Plan, plan
from titan_fsdp._planned import PlannedParam, PlannedUnit, Sizes
from titan_fsdp._policy import Comm, MixedPrecision, Policy, Prefetch, Unit
from titan_fsdp._state import eval_mode, full_state_dict, reshard
from titan_fsdp._verify import CollectiveCounter, Verification, verify

__all__ = [
    "CollectiveCounter",
    "Collectives",
    "Comm",
    "Estimate",
    "Init",
    "Keep",
    "MixedPrecision",
    "Plan",
    "PlannedParam",
    "PlannedUnit",
    "Policy",
    "Prefetch",
    "Sizes",
    "Unit",
    "Verification",
    "accumulate",
    "applied_plan",
    "check_optimizer",
    "check_wrapping",
    "clean_fqn",
    "clip_grad_norm_",
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
