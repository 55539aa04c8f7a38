"""Where the ranks of a run come from, and what happens when one is lost."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from titan_train.values import Count, Range, check_values


@dataclass(frozen=True, kw_only=True, slots=True)
class RayConfig:
    """The Ray cluster that `--launcher ray` places ranks on (`pip install titan-train[ray]`)."""

    address: str = ""
    """host:port of a cluster's head, or "auto" for the one this machine belongs to; empty starts one here, on
    loopback only, for the length of the run."""

    placement: Literal["auto", "strict_pack", "pack", "spread", "strict_spread"] = "auto"
    """How nodes are chosen: auto takes strict_pack for one node and strict_spread for several, each node holding
    launch.nproc ranks whole."""

    cpus_per_rank: Annotated[float, Range(above=0)] = 1.0
    """CPU cores that Ray reserves per rank."""

    wait_s: Annotated[float, Range(above=0)] = 60.0
    """Seconds to wait for nodes, at the start and after a loss, before the run fails. An elastic run shrinks at once."""

    unreachable_s: Annotated[float, Range(1.4, note="a node is asked three times before it counts as lost")] = 1.4
    """Seconds after which a node that nothing comes back from counts as lost; at least 1.4. Raise it above the longest pause
    of your switches."""

    topology: tuple[str, ...] = ()
    """Labels of the nodes that say which are close, outermost first, such as rack, nvlink_domain (`ray start --labels`)."""

    driver: Literal["actor", "command"] = "actor"
    """What holds the supervisor on a cluster with an address: an actor that Ray restarts elsewhere, or this command."""

    env: tuple[str, ...] = ()
    """Further environment variables to pass to ranks on other nodes. OMP_*, NCCL_*, GLOO_*, TORCH_*,
    PYTORCH_*, TRITON_*, FI_*, UCX_* and CUDA_MODULE_LOADING are always passed."""

    @property
    def on_cluster(self) -> bool:
        """Whether the supervisor runs on the cluster, which outlives the command."""
        return bool(self.address) and self.driver == "actor"

    def __post_init__(self) -> None:
        check_values("launch.ray", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """How `titan-train run` starts ranks and restarts them."""

    launcher: Literal["local", "machines", "ray"] = "local"
    """Where ranks run: on this machine (local), on the machines that this command is started on, or on a Ray cluster."""

    nproc: Annotated[int, Range(0, 2**12, note="0 takes all GPUs")] = 0
    """Ranks per machine; 0 takes all GPUs, or without GPUs one process with all cores (more where the degrees need them)."""

    nnodes: Annotated[int, Range(1, 2**18)] = 1
    """Number of machines. More than one needs launcher 'machines' or 'ray'; `check` accepts any number."""

    node_rank: Annotated[int, Range(0)] = 0
    """Which of launch.nnodes machines this is, for launcher 'machines'. Machine 0 supervises the run."""

    endpoint: str = ""
    """Rendezvous address on machine 0 (host:port) for several machines under launcher 'machines'."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA if there is a GPU."""

    bind_numa: bool = True
    """Keep each GPU rank on the CPU cores of the socket that its GPU is attached to, where the machine says which."""

    port: Annotated[int, Range(0, 65535, note="0 takes a free one")] = 0
    """Rendezvous port for several nodes under launcher 'ray'; 0 takes a free one."""

    timeout_s: Annotated[float, Range(above=0)] = 600.0
    """Seconds a collective may take during start-up, a save or a validation before the run fails."""

    step_timeout_s: Annotated[float, Range(0, note="0 keeps timeout_s")] = 120.0
    """Seconds a collective may take after the first step; 0 keeps timeout_s, as does a run that compiles."""

    max_restarts: Annotated[int, Range(0, note="0 never restarts")] = 3
    """Restarts within restart_window_s, or in a row without a step, before the run gives up; 0 never restarts."""

    restart_window_s: Annotated[float, Range(above=0)] = 3600.0
    """Seconds after which a restart no longer counts against max_restarts."""

    hang_factor: Annotated[float, Range(above=1, also=0, note="0 disables")] = 20.0
    """A step hangs when it takes this many times the median step; 0 disables hang detection."""

    hang_least_s: Annotated[float, Range(above=0)] = 60.0
    """A step counts as hanging only after this many seconds, even if steps are short."""

    straggler_factor: Annotated[float, Range(above=1, also=0, note="0 disables")] = 1.5
    """Report each rank whose own step time is this many times the median of all ranks; 0 disables."""

    elastic: bool = False
    """Continue with fewer ranks when ranks are lost (data-parallel degrees shrink), and grow back when they return."""

    min_ranks: Count = 1
    """Elastic: fewest ranks to continue with."""

    rejoin_s: Annotated[float, Range(above=0)] = 300.0
    """Elastic, launcher local: seconds that a place stays unused after its rank was lost twice in a row."""

    faults: str = ""
    """Faults to inject as a test: "kill rank=3 step=20; hang rank=1 step=40". `--faults` is short for this."""

    ray: RayConfig = field(default_factory=RayConfig)
    """The Ray launcher's own settings."""

    def __post_init__(self) -> None:
        check_values("launch", self)
        if self.nproc * self.nnodes > 2**18:
            raise ValueError(
                f"launch.nproc={self.nproc} on launch.nnodes={self.nnodes} machines: at most 262,144 ranks are "
                "supported. Lower one."
            )
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"launch.node_rank={self.node_rank} is not below launch.nnodes={self.nnodes}: machines count from 0."
            )
        if self.launcher == "local" and self.nnodes > 1:
            return  # `check` describes any number of machines; `run` says what starts them
        if self.launcher == "machines" and self.nnodes > 1 and not _is_port(self.endpoint.rpartition(":")[2]):
            raise ValueError(
                f"launch.endpoint={self.endpoint!r}: {self.nnodes} machines need a rendezvous address. Give host:port of "
                "machine 0, the same on every machine, with a port below 65536, such as 'node0:29500'."
            )
        if self.faults:
            from titan_train.config.faults import parse_faults

            parse_faults(self.faults)


def _is_port(text: str) -> bool:
    return text.isdecimal() and 0 < int(text) < 65536
