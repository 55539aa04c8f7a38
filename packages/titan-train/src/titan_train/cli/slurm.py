"""Write an sbatch file that runs a configuration on several machines.

`titan-train slurm my.toml --launcher machines --launch.nnodes 4 --launch.nproc 8 --out my.sbatch`, then `sbatch my.sbatch`.
Every other setting is passed on to the run. Submitting the same file again continues the run.
"""

from collections.abc import Sequence
from pathlib import Path

from titan_train.cli.branch import written_out
from titan_train.cli.parser import CommandParser, integer
from titan_train.launch.place.slurm import SlurmJob, sbatch_text
from titan_train.parallel.layout.run import plan_run


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.usage = (
        "titan-train slurm CONFIG [--out FILE] [--time LIMIT] [--partition NAME] [--shared] [--section.key value ...]"
    )
    parser.add_config()
    parser.add_code()
    parser.add_argument("--out", type=Path, default=None, help="file to write (default: standard output)")
    parser.add_argument("--time", default="24:00:00", help="time limit; default 24:00:00")
    parser.add_argument("--partition", default="", help="Slurm's partition")
    parser.add_argument("--account", default="", help="Slurm's account")
    parser.add_argument(
        "--warn-s",
        type=integer(1, 86400),
        default=120,
        metavar="S",
        help="seconds to save before the limit; default 120",
    )
    parser.add_argument("--shared", action="store_true", help="take a part of each machine; default: whole machines")
    parser.add_argument(
        "--cpus-per-task",
        type=integer(1, 65536),
        default=0,
        metavar="N",
        help="CPUs of each machine; default: all of a whole machine, else 8 per GPU or 1 per CPU rank",
    )
    parser.add_argument(
        "--mem",
        default="",
        metavar="SIZE",
        help="memory of each machine, such as 512G; default: all of a whole machine",
    )
    parser.add_argument(
        "--port", type=integer(1, 65535), default=29500, help="rendezvous port on the first machine; default 29500"
    )
    arguments, overrides = parser.parse_with_settings(words, written_out)
    # the place where machines meet is known only inside the job
    config = parser.read_config(arguments.config, [*overrides, "--launch.endpoint", f"HEAD:{arguments.port}"])
    per_node = config.launch.nproc
    if per_node == 0:
        raise ValueError(
            "launch.nproc=0: the machine that writes the file may differ from those that run it. Give the ranks per "
            "machine, such as --launch.nproc 8."
        )
    plan_run(config, per_node * config.launch.nnodes)
    text = sbatch_text(
        config,
        SlurmJob(
            config=arguments.config,
            overrides=[*(word for path in arguments.code for word in ("--code", path)), *overrides],
            time_limit=arguments.time,
            partition=arguments.partition,
            account=arguments.account,
            warn_s=arguments.warn_s,
            port=arguments.port,
            shared=arguments.shared,
            cpus=arguments.cpus_per_task,
            memory=arguments.mem,
        ),
        per_node,
    )
    if arguments.out is None:
        print(text, end="")
    else:
        arguments.out.write_text(text, encoding="utf-8")
        print(f"wrote {arguments.out}: submit it with `sbatch {arguments.out}`")
    return 0
