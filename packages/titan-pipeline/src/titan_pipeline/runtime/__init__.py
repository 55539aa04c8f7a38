"""Run schedules: stages, transports, the weight-gradient engine. Needs torch: the extra ``titan-pipeline[torch]``."""

from titan_pipeline.runtime._device_transport import DeviceTransport
from titan_pipeline.runtime._executor import Executor, StepResult
from titan_pipeline.runtime._messages import Failure, PipelineAborted
from titan_pipeline.runtime._optimizer import Optimistic, clip_grad_norm
from titan_pipeline.runtime._process_group import GlooTransport
from titan_pipeline.runtime._split import split_layers
from titan_pipeline.runtime._stage import Stage, TorchStage
from titan_pipeline.runtime._tied import TiedWeight, find_tied_weights
from titan_pipeline.runtime._torch_pipelining import schedule_from_torch, torch_runtime
from titan_pipeline.runtime._transport import ThreadHub, ThreadTransport, Transport
from titan_pipeline.runtime._weight_grad import NORM_RULES, Queue, WeightGradEngine, grouped_linear

__all__ = [
    "NORM_RULES",
    "DeviceTransport",
    "Executor",
    "Failure",
    "GlooTransport",
    "Optimistic",
    "PipelineAborted",
    "Queue",
    "Stage",
    "StepResult",
    "ThreadHub",
    "ThreadTransport",
    "TiedWeight",
    "TorchStage",
    "Transport",
    "WeightGradEngine",
    "clip_grad_norm",
    "find_tied_weights",
    "grouped_linear",
    "schedule_from_torch",
    "split_layers",
    "torch_runtime",
]
