"""Pipeline-parallel schedules as plain data: generate, verify, simulate, solve, draw, run.

============  ======================================================================
`ir`          schedules and costs as plain data
`families`    the published schedules by name, and how to add one
`analysis`    proof, timeline, memory, bounds, measurements
`solver`      search the best schedule for costs and a memory limit
`view`        SVG, HTML, Chrome traces
`runtime`     run a schedule; the only folder that imports torch
`cli`         the command ``titan-pipeline``
============  ======================================================================
"""

from titan_pipeline import families
from titan_pipeline.analysis.balance import balanced_cut
from titan_pipeline.analysis.bounds import lower_bound
from titan_pipeline.analysis.measure import Measurement, fit_costs
from titan_pipeline.analysis.simulate import Breakdown, Simulation, Slot, Transfer, simulate
from titan_pipeline.analysis.verify import Certificate, verify
from titan_pipeline.errors import ScheduleError
from titan_pipeline.families import FAMILIES, ScheduleFamily, build_schedule, find_family, register_family
from titan_pipeline.ir.costs import Costs, Link
from titan_pipeline.ir.csv import from_torch_csv, to_torch_csv
from titan_pipeline.ir.lower import lower
from titan_pipeline.ir.placement import Placement, loop_placement, placement_from, v_placement
from titan_pipeline.ir.schedule import Action, Kind, Schedule
from titan_pipeline.solver.annealing import SolveProgress
from titan_pipeline.solver.search import Solution, pareto, solve
from titan_pipeline.view.svg import draw_executed_svg, draw_html, draw_svg
from titan_pipeline.view.trace import chrome_trace

__all__ = [
    "FAMILIES",
    "Action",
    "Breakdown",
    "Certificate",
    "Costs",
    "Kind",
    "Link",
    "Measurement",
    "Placement",
    "Schedule",
    "ScheduleError",
    "ScheduleFamily",
    "Simulation",
    "Slot",
    "Solution",
    "SolveProgress",
    "Transfer",
    "balanced_cut",
    "build_schedule",
    "chrome_trace",
    "draw_executed_svg",
    "draw_html",
    "draw_svg",
    "families",
    "find_family",
    "fit_costs",
    "from_torch_csv",
    "loop_placement",
    "lower",
    "lower_bound",
    "pareto",
    "placement_from",
    "register_family",
    "simulate",
    "solve",
    "to_torch_csv",
    "v_placement",
    "verify",
]
