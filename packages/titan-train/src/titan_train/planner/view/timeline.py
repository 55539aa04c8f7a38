"""Memory over time as a picture, and as a snapshot that torch's memory viewer opens.

The snapshot is what ``torch.cuda.memory._snapshot`` returns, pickled: plain dictionaries, lists, strings and numbers. Drop it on
the viewer's page (docs.pytorch.org/memory_viz); nothing here reads one. Each allocation is a segment of its own at
an address of its own: where torch's allocator would place it is not predicted.
"""

import itertools
import pickle
from html import escape
from typing import Any

from titan_train.planner.memory.timeline import MemoryTimeline
from titan_train.planner.view.svg import COLOURS, WIDTH, svg_page

_GIB = 2.0**30
_ORDER = ("parameters", "optimizer", "gradients", "workspace", "messages", "gathered", "activations", "temporary")
_COLUMNS = 700
_LEFT, _TOP, _HEIGHT = 60, 40, 320
_BASE = 0x7F0000000000


def timeline_svg(timeline: MemoryTimeline) -> str:
    """Bytes by category over the events of a step, the fullest event marked."""
    levels = {name: line for name, line in timeline.levels().items() if any(line)}
    names = sorted(levels, key=_ORDER.index)
    number, peak = timeline.peak
    # of each column the fullest event, so that no peak is lost
    count = min(_COLUMNS, timeline.num_events)
    edges = [timeline.num_events * n // count for n in range(count + 1)]
    totals = [sum(at) for at in zip(*levels.values(), strict=True)]
    shown = [max(range(a, b), key=totals.__getitem__) for a, b in itertools.pairwise(edges)]
    wide = (WIDTH - _LEFT - 20) / count

    def y(size: float) -> float:
        return _TOP + _HEIGHT * (1 - size / (1.05 * peak))

    parts: list[str] = []
    below = [0] * count
    for place, name in enumerate(names):
        above = [low + levels[name][at] for low, at in zip(below, shown, strict=True)]
        line = [f"{_LEFT + wide * (n + 0.5):.1f},{y(size):.1f}" for n, size in enumerate(above)]
        back = [f"{_LEFT + wide * (n + 0.5):.1f},{y(size):.1f}" for n, size in enumerate(below)]
        colour = COLOURS[place % len(COLOURS)]
        label = f"{escape(name)}: {levels[name][number] / _GIB:.2f} GiB at the peak"
        parts.append(
            f'<polygon points="{" ".join(line + back[::-1])}" fill="{colour}"><title>{label}</title></polygon>'
        )
        left, down = _LEFT + 265 * (place % 3), _TOP + _HEIGHT + 42 + 20 * (place // 3)
        parts.append(f'<rect x="{left}" y="{down - 10}" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{left + 17}" y="{down}">{label}</text>')
        below = above
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<text x="8" y="{y(share * peak) + 4:.1f}">{share * peak / _GIB:.1f}</text>')
    at = _LEFT + wide * next(n for n in range(count) if number < edges[n + 1])
    made = max((a for a in timeline.allocations if a.start <= number), key=lambda a: a.start)
    where = f"peak {peak / _GIB:.2f} GiB: {made.where}, {made.operator}"
    parts.append(f'<path d="M{at:.1f} {_TOP} V{_TOP + _HEIGHT}" stroke="#cb3c33" stroke-dasharray="4 3"/>')
    turned = f' text-anchor="end" x="{at - 5:.1f}"' if at > WIDTH / 2 else f' x="{at + 5:.1f}"'
    parts.append(f'<text{turned} y="{_TOP + 4}">{escape(where)}</text>')
    for event, text in timeline.marks if len(timeline.marks) <= 24 else ():
        parts.append(
            f'<text x="{_LEFT + wide * count * event / timeline.num_events:.1f}" y="{_TOP + _HEIGHT + 14}">{text}</text>'
        )
    note = f" ({timeline.note})" if timeline.note else ""
    title = f"{timeline.title}: GiB on the fullest rank, by allocation and free, in the program's order{note}"
    return svg_page(title, _TOP + _HEIGHT + 60 + 20 * -(-len(names) // 3), parts)


def timeline_snapshot(timeline: MemoryTimeline) -> bytes:
    """The pickled snapshot."""
    events: list[dict[str, Any]] = []
    order = sorted(
        [(a.start, True, n) for n, a in enumerate(timeline.allocations)]
        + [(a.end, False, n) for n, a in enumerate(timeline.allocations) if a.end < timeline.num_events]
    )
    held = dict[int, dict[str, Any]]()
    address = _BASE
    for at, starts, n in order:
        a = timeline.allocations[n]
        if starts:
            # the viewer wants a category called unknown: what torch's allocator does not hold
            category = "unknown" if a.category == "workspace" else a.category
            frames = [{"filename": a.where, "line": 0, "name": f"{a.operator} ({a.category})"}]
            held[n] = {"addr": address, "size": a.size, "stream": 0, "frames": frames, "category": category}
            address += a.size
        entry = (held[n] if starts else held.pop(n)) | {"time_us": at}
        for action in ("segment_alloc", "alloc") if starts else ("free_requested", "free_completed", "segment_free"):
            events.append({"action": action, **entry})
    segments = [_segment(entry["addr"], entry["size"], entry["frames"]) for entry in held.values()]
    return pickle.dumps({"segments": segments, "device_traces": [events]}, protocol=4)


def _segment(address: int, size: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    block = {"address": address, "size": size, "requested_size": size, "state": "active_allocated", "frames": frames}
    return {
        "device": 0, "address": address, "total_size": size, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
        "allocated_size": size, "active_size": size, "requested_size": size, "is_expandable": False, "frames": frames,
        "blocks": [block],
    }  # fmt: skip
