"""Run schedules. Needs torch: the extra ``titan-pipeline[torch]``.

====================  ==============================================================
`executor`            runs the programs of one rank: `Executor`
`clock`               when actions ran
`agreement`           all ranks have one schedule; what a split backward gains
`program`             one rank's part of a schedule, compiled
`step`                one step: walk the program
`stage`               stages of a model
`whole_model`         cut a whole model, its own forward unchanged
`transport`           how messages move
`weight_grad`         split a backward
`watchdog`            name the rank that hangs
`optimizer`           exact global clip, optimistic step
`torch_pipelining`    our schedules in torch's runtime, torch's in ours
====================  ==============================================================
"""

from titan_pipeline.runtime.agreement import DeferredWork, solve_on_rank0
from titan_pipeline.runtime.clock import Clock, DeviceClock, HostClock
from titan_pipeline.runtime.executor import Executor, PipelineResult
from titan_pipeline.runtime.optimizer import Optimistic, clip_grad_norm
from titan_pipeline.runtime.stage.cut import split_layers
from titan_pipeline.runtime.stage.protocol import Stage
from titan_pipeline.runtime.stage.tied import TiedWeight, find_tied_weights
from titan_pipeline.runtime.stage.torch_stage import TorchStage
from titan_pipeline.runtime.torch_pipelining import schedule_from_torch, torch_runtime
from titan_pipeline.runtime.transport.base import Transport
from titan_pipeline.runtime.transport.connect import host_transport
from titan_pipeline.runtime.transport.device import DeviceTransport
from titan_pipeline.runtime.transport.gloo import GlooTransport
from titan_pipeline.runtime.transport.messages import PeerFailure, PipelineAborted
from titan_pipeline.runtime.transport.plain import register_structure
from titan_pipeline.runtime.transport.sockets import SocketTransport
from titan_pipeline.runtime.transport.threads import ThreadHub, ThreadTransport
from titan_pipeline.runtime.weight_grad.compiled import split_backend
from titan_pipeline.runtime.weight_grad.engine import WeightGradEngine
from titan_pipeline.runtime.weight_grad.grouped import grouped_linear
from titan_pipeline.runtime.weight_grad.queue import WeightGradQueue
from titan_pipeline.runtime.weight_grad.rules import NORM_RULES
from titan_pipeline.runtime.whole_model.cutter import ModelSplit, split

__all__ = [
    "NORM_RULES",
    "Clock",
    "DeferredWork",
    "DeviceClock",
    "DeviceTransport",
    "Executor",
    "GlooTransport",
    "HostClock",
    "ModelSplit",
    "Optimistic",
    "PeerFailure",
    "PipelineAborted",
    "PipelineResult",
    "SocketTransport",
    "Stage",
    "ThreadHub",
    "ThreadTransport",
    "TiedWeight",
    "TorchStage",
    "Transport",
    "WeightGradEngine",
    "WeightGradQueue",
    "clip_grad_norm",
    "find_tied_weights",
    "grouped_linear",
    "host_transport",
    "register_structure",
    "schedule_from_torch",
    "solve_on_rank0",
    "split",
    "split_backend",
    "split_layers",
    "torch_runtime",
]
