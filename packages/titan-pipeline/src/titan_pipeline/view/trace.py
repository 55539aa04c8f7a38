"""Timelines as Chrome trace events, for Perfetto and ``chrome://tracing``.

Each run (planned, measured) is a process, each rank a thread. Arrows follow messages, counters show memory. Give a plan and
a measurement to see them over each other.
"""

import json
from typing import Any

from titan_pipeline.analysis.simulate import Simulation


def chrome_trace(*simulations: tuple[str, Simulation], microseconds: float = 1e6) -> str:
    """A trace file with one process per timeline.

    Args:
        simulations: ``(label, timeline)``; several are overlaid.
        microseconds: Length of one time unit of the costs; 1e6 for seconds.
    """
    events: list[dict[str, Any]] = []
    for process, (label, simulation) in enumerate(simulations):
        events.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": label}})
        for rank, slots in enumerate(simulation.timeline):
            events.append(
                {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": {"name": f"rank {rank}"}}
            )
            events += [
                {
                    "ph": "X",
                    "name": str(slot.action),
                    "cat": slot.action.kind.value,
                    "pid": process,
                    "tid": rank,
                    "ts": slot.start * microseconds,
                    "dur": (slot.end - slot.start) * microseconds,
                    "args": {"stage": slot.action.stage, "microbatch": slot.action.microbatch},
                }
                for slot in slots
            ]
            events += [
                {
                    "ph": "C",
                    "name": f"memory rank {rank}",
                    "pid": process,
                    "tid": rank,
                    "ts": time * microseconds,
                    "args": {"held": level},
                }
                for time, level in simulation.memory[rank]
            ]
        for k, t in enumerate(simulation.transfers):
            arrow = {"cat": "message", "name": str(t.action), "pid": process, "id": process * 10_000_000 + k}
            events.append({**arrow, "ph": "s", "tid": t.source, "ts": t.departure * microseconds})
            events.append({**arrow, "ph": "f", "bp": "e", "tid": t.target, "ts": t.arrival * microseconds})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
