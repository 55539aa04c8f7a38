"""A mixture of experts as a plain module: router, stacked experts, dropless dispatch, balancing."""

from titan_train.models.moe.args import MoEArgs
from titan_train.models.moe.balance import (
    LayerRouting,
    moe_layers,
    routing_statistics,
    set_aux_scale,
    set_sequence_group,
    share_routing,
    update_expert_bias,
)
from titan_train.models.moe.dispatch import LocalDispatch
from titan_train.models.moe.experts import Experts, GroupedMM, grouped_mm_loop, grouped_mm_masked
from titan_train.models.moe.layer import MoE
from titan_train.models.moe.router import Gate, Router, Routing

__all__ = [
    "Experts",
    "Gate",
    "GroupedMM",
    "LayerRouting",
    "LocalDispatch",
    "MoE",
    "MoEArgs",
    "Router",
    "Routing",
    "grouped_mm_loop",
    "grouped_mm_masked",
    "moe_layers",
    "routing_statistics",
    "set_aux_scale",
    "set_sequence_group",
    "share_routing",
    "update_expert_bias",
]
