"""Optimizers with parameter groups by pattern, and learning-rate schedules.

- `groups`: which parameter gets which settings; `matrices`: which are Muon's. `build`: the optimizer; `update`: AdamW's kernel.
- `compact_adamw`: AdamW with small states and weights, in the formats of `compact_states`. `schedule_free`: AdamW that averages
  its weights.
- `newton_schulz`: Muon's update of one matrix. `ownership`: which rank computes it. `muon`: the optimizer;
  `muon_step`: its messages between ranks.
- `schedule`: the learning rate of a step. `average`: EMA and mean of weights. `spikes`: steps that are left out.
"""

from typing import TYPE_CHECKING

from titan_train.lazy import first_use

if TYPE_CHECKING:
    from titan_train.optim.build import build_optimizer, check_restored
    from titan_train.optim.groups import ParameterGroup, plan_groups
    from titan_train.optim.muon import Muon
    from titan_train.optim.schedule import Scheduler, build_scheduler, lr_factor

__all__ = [
    "Muon",
    "ParameterGroup",
    "Scheduler",
    "build_optimizer",
    "build_scheduler",
    "check_restored",
    "lr_factor",
    "plan_groups",
]

__getattr__ = first_use(__name__)
