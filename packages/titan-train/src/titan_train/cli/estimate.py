"""Estimate a configuration before a device is rented: time by term, memory by use, tokens per second with an interval.

`titan-train estimate llama3_70b --hardware h100 --gpus 512 --svg estimate.svg`. No torch, no ranks: under a second.
"""

from collections.abc import Sequence
from pathlib import Path

from titan_train.cli.shell.parser import CommandParser, integer


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command. Exit code 2 where the setup does not fit."""
    parser.usage = "titan-train estimate CONFIG --hardware NAME --gpus N [--svg FILE] [--section.key value ...]"
    parser.add_config()
    parser.add_argument("--hardware", default="h100", help="shipped machine, or a file of doctor --bench")
    parser.add_argument("--gpus", type=integer(1, 10**7), required=True, help="devices")
    parser.add_argument("--constants", help="file of titan-train calibrate, instead of the shipped constants")
    parser.add_argument("--svg", type=Path, help="write the picture here")
    arguments, settings = parser.parse_with_settings(words)

    from titan_train.planner.calibrate.defaults import constants_for
    from titan_train.planner.calibrate.runs import load_constants
    from titan_train.planner.estimate import estimate
    from titan_train.planner.hardware.machine import load_machine
    from titan_train.planner.search.refuse import refuse_setup
    from titan_train.planner.shapes import shape_of_config
    from titan_train.planner.translate import setup_of_config
    from titan_train.planner.view.svg import estimate_svg
    from titan_train.planner.view.tables import estimate_text

    config = parser.read_config(arguments.config, settings)
    machine = load_machine(arguments.hardware)
    shape, setup = shape_of_config(config), setup_of_config(config, arguments.gpus)
    constants = (
        load_constants(arguments.constants)
        if arguments.constants
        else constants_for(machine, setup, routed=shape.moe, model=shape.name)
    )
    found = estimate(shape, machine, setup, constants)
    print(estimate_text(found))
    if arguments.svg:
        arguments.svg.write_text(estimate_svg(found))
        print(f"\npicture: {arguments.svg}")
    if found.memory.allocated > machine.memory_bytes:
        print(f"\n{setup.describe()} {refuse_setup(shape, setup, found.memory, 0.98 * machine.memory_bytes)}")
        return 2
    return 0
