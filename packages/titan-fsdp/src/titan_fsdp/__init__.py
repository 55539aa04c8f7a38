"""An FSDP2, HSDP and DDP wrapping policy for any nn.Module: plan, explain, apply, verify.

What needs FSDP2 itself is imported on first use: planning and estimating do not, and it takes a second.
"""

import importlib
from typing import TYPE_CHECKING, Any

from titan_fsdp.loaded import is_dtensor
from titan_fsdp.names import clean_fqn, named_parameters, unwrap
from titan_fsdp.planning.collectives import Accumulate, Collectives
from titan_fsdp.planning.data import PlannedParam, PlannedUnit, Sizes
from titan_fsdp.planning.estimate import Estimate
from titan_fsdp.planning.policy import Comm, MixedPrecision, Policy, Prefetch, Unit
from titan_fsdp.torch_private import share_streams
from titan_fsdp.weights.conventions import Init, conventional_init
from titan_fsdp.weights.materialize import generator_for, materialize
from titan_fsdp.wrap_plan import WrapPlan, plan
from titan_fsdp.wrapping.checks import check_optimizer, check_wrapping

if TYPE_CHECKING:
    from titan_fsdp.planning.timeline import MemoryEvent, MemoryTrace
    from titan_fsdp.training.accumulate import accumulate, drop_unreached
    from titan_fsdp.training.clip import clip_grad_norm_
    from titan_fsdp.training.state import eval_mode, full_state_dict, reshard
    from titan_fsdp.training.verify import CollectiveCounter, Verification, verify
    from titan_fsdp.wrapping.apply import applied_plan
    from titan_fsdp.wrapping.powersgd import PowerSGD, gradient_compression

_ON_USE = {
    "MemoryEvent": "titan_fsdp.planning.timeline",
    "MemoryTrace": "titan_fsdp.planning.timeline",
    "accumulate": "titan_fsdp.training.accumulate",
    "drop_unreached": "titan_fsdp.training.accumulate",
    "clip_grad_norm_": "titan_fsdp.training.clip",
    "eval_mode": "titan_fsdp.training.state",
    "full_state_dict": "titan_fsdp.training.state",
    "reshard": "titan_fsdp.training.state",
    "CollectiveCounter": "titan_fsdp.training.verify",
    "Verification": "titan_fsdp.training.verify",
    "verify": "titan_fsdp.training.verify",
    "applied_plan": "titan_fsdp.wrapping.apply",
    "PowerSGD": "titan_fsdp.wrapping.powersgd",
    "gradient_compression": "titan_fsdp.wrapping.powersgd",
}

__all__ = [
    "Accumulate",
    "CollectiveCounter",
    "Collectives",
    "Comm",
    "Estimate",
    "Init",
    "MemoryEvent",
    "MemoryTrace",
    "MixedPrecision",
    "PlannedParam",
    "PlannedUnit",
    "Policy",
    "PowerSGD",
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
    "drop_unreached",
    "eval_mode",
    "full_state_dict",
    "generator_for",
    "gradient_compression",
    "is_dtensor",
    "materialize",
    "named_parameters",
    "plan",
    "reshard",
    "share_streams",
    "unwrap",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_ON_USE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
