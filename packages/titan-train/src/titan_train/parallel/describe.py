"""What became of a configuration's options on this rank: lines for the log, and the text of ``layout.txt``."""

from titan_mesh import Layout
from titan_pipeline import Schedule

from titan_train.config import Config
from titan_train.models.call import active_dropout, computes_on
from titan_train.models.hf.configuration import balance_ignored
from titan_train.models.hf.folder import PREFIX
from titan_train.parallel.float8 import conversion_table, describe_conversion
from titan_train.parallel.model import ParallelModel
from titan_train.parallel.tensor.async_linears import overlapped_modules


def describe_options(config: Config, model: ParallelModel) -> list[str]:
    """Lines for the log: what came of options that take effect only where a layer allows it, on this rank's parts."""
    lines: list[str] = []
    if model.report.float8:
        lines.append(
            describe_conversion(model.report.float8, config.float8, model.parts, staged=model.pipeline is not None)
        )
    if config.parallel.async_tp and config.parallel.tp > 1 and model.report.fused is None:
        names = [name for part in model.parts for name in overlapped_modules(part)]
        found = f"the transfers of {len(names)} modules (layout.txt names them)" if names else (
            "nothing: of a region, all linears must be plain, not float8, and their input goes through one SharedInput"
        )  # fmt: skip
        lines.append(f"parallel.async_tp=true overlaps {found}")
    device = computes_on(model.parts[0]).type
    if config.activations.offload and device != "cuda":
        lines.append(
            f"activations.offload=true moves nothing: this run is on {device}, and only CUDA tensors leave for the host"
        )
    dropped = active_dropout(model.parts)
    if dropped:
        rates = ", ".join(f"{rate} ({count}x)" for rate, count in dropped.items())
        lines.append(
            f"dropout is active: {rates}. What is dropped depends on run.seed, the step, and the rank's place in data and "
            "context parallelism and the pipeline. Set the rates to 0 in model.args to train without dropout"
        )
    if config.model.name.startswith(PREFIX):
        lines += balance_ignored(config.model.name)
    if config.profile.range is not None and config.profile.range[0] > config.train.steps:
        lines.append(
            f"profile.steps={config.profile.steps!r} begins after the last step, {config.train.steps}: no trace"
        )
    return lines


def describe_layout(layout: Layout, model: ParallelModel, schedule: Schedule | None) -> str:
    """The text of ``layout.txt``: the rank table, the schedule, what overlaps, then what each wrapped unit does."""
    parts = [layout.explain()]
    parts += [f"float8 {report.recipe}\n{conversion_table(report)}" for report in model.report.float8]
    if schedule is not None:
        parts.append(f"pipeline schedule {schedule.name}, {schedule.num_stages} stages\n{schedule.to_text()}")
    overlapped = [name for part in model.parts for name in overlapped_modules(part)]
    if overlapped:
        parts.append("asynchronous tensor parallelism: transfers overlap the products of\n  " + "\n  ".join(overlapped))
    return "\n\n".join([*parts, *(plan.explain() for plan in model.report.plans)])
