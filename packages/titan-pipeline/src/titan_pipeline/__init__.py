"""Pipeline-parallel schedules as plain data: generate, verify, simulate, solve, draw. Nothing here imports torch."""

from titan_pipeline import families
from titan_pipeline._bounds import lower_bound
from titan_pipeline._costs import Costs, Link
from titan_pipeline._csv import from_torch_csv, to_torch_csv
from titan_pipeline._draw import draw_html, draw_svg
from titan_pipeline._errors import ScheduleError
from titan_pipeline._lower import lower
from titan_pipeline._measure import Measurement, fit_costs
from titan_pipeline._placement import Placement, loop_placement, placement_from, v_placement
from titan_pipeline._schedule import Action, Kind, Schedule
from titan_pipeline._simulate import Breakdown, Simulation, Slot, Transfer, simulate
from titan_pipeline._solve import Progress, Solution, pareto, solve
from titan_pipeline._split import balanced_cut
from titan_pipeline._trace import chrome_trace
from titan_pipeline._verify import Certificate, verify
from titan_pipeline.families import FAMILIES, build_schedule

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
    "Progress",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "Slot",
    "Solution",
    "Transfer",
    "balanced_cut",
    "build_schedule",
    "chrome_trace",
    "draw_html",
    "draw_svg",
    "families",
    "fit_costs",
    "from_torch_csv",
    "loop_placement",
    "lower",
    "lower_bound",
    "pareto",
    "placement_from",
    "simulate",
    "solve",
    "to_torch_csv",
    "v_placement",
    "verify",
]
