"""Rehearse one rank of a large run on this machine: fake tensors, no other ranks, nothing allocated.

`titan-train dry-run llama3_8b --world 512` builds the real program of each pipeline rank on the meta device, runs one
microbatch of it on fake tensors under a process group that pretends to have all ranks, and prints the memory that this
needs. Beside it stand the transfers of a step by axis, for models that the planner knows: they are computed, and a test
holds them to counted ones.
"""

import dataclasses
from collections.abc import Sequence

from titan_train.cli.shell.parser import CommandParser, integer


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.usage = "titan-train dry-run CONFIG --world N [--section.key value ...]"
    parser.add_config()
    parser.add_argument("--world", type=integer(1, 10**7), required=True, help="ranks of the run")
    arguments, settings = parser.parse_with_settings(words)

    from titan_train.models import build_model
    from titan_train.parallel.check import check_model
    from titan_train.parallel.layout.run import plan_run
    from titan_train.parallel.structure import freeze
    from titan_train.planner.comm.traffic import step_traffic
    from titan_train.planner.memory.ranks import estimate_ranks
    from titan_train.planner.shapes import shape_of_config
    from titan_train.planner.translate import setup_of_config
    from titan_train.run_folder import run_folder
    from titan_train.task import load_task
    from titan_train.trust import admit_own_code

    config = parser.read_config(arguments.config, settings)
    admit_own_code(run_folder(config), config.model.name, arguments.code)
    per_node = config.launch.nproc or 8
    nodes = max(1, arguments.world // per_node)
    config = dataclasses.replace(config, launch=dataclasses.replace(config.launch, nnodes=nodes))
    plan = plan_run(config, arguments.world)
    vocabulary = load_task(config).vocab_size(config)
    model = build_model(config.model, vocab_size=vocabulary, device="meta")
    freeze(model, config.train.freeze)
    check_model(config, plan.layout, plan.batch, model)
    ranks = estimate_ranks(
        config,
        model,
        layout=plan.layout,
        mode=plan.mode,
        batch=plan.batch,
        schedule=plan.schedule,
        closed_form=False,
    )
    print(plan.layout.explain())
    print(f"\n{'pipeline rank':<14}{'parameters':>12}{'state GiB':>11}{'kept GiB':>10}{'peak GiB':>10}")
    for rank in ranks:
        state, kept, peak = (
            x / 2**30 for x in (rank.params + rank.grads + rank.optimizer, rank.activations, rank.peak)
        )
        print(f"{rank.pipeline_rank:<14}{rank.num_parameters:>12,}{state:>11.2f}{kept:>10.2f}{peak:>10.2f}")
    try:
        setup, shape = setup_of_config(config, arguments.world), shape_of_config(config)
    except ValueError as why:
        print(f"\ntransfers of a step: not computed. {why}")
        return 0
    if vocabulary:
        shape = dataclasses.replace(shape, vocab=vocabulary)
    traffic = step_traffic(shape, setup, element_bytes=4 if config.train.dtype == "fp32" else 2)
    print(f"\n{'transfers of a step, first rank':<34}{'count':>8}{'GB':>10}")
    for (axis, kind), count in sorted(traffic.counts.items()):
        print(f"  {axis:<14}{kind:<18}{count:>8,}{traffic.num_bytes[axis, kind] / 1e9:>10.3f}")
    return 0
