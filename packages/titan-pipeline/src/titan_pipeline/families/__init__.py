"""Every published schedule that this package generates, one file per group.

================  ========================================================================
`registry`        families by name: `FAMILIES`, `build_schedule`, `register_family`
`one_f_one_b`     gpipe, 1f1b, interleaved_1f1b, looped_bfs: backwards stay whole
`zero_bubble`     zb_h1, zb_h2, interleaved_zb, zbv: backwards are split
`zb_auto`         zb_auto: zero bubble for given costs and memory limit
`v_shaped`        v_half, v_min, 1f1b_v: a V with less memory
`dualpipe`        dualpipe_v: overlapped forward and backward pairs
================  ========================================================================

A file registers its families when it is imported.
"""

from titan_pipeline.families.one_f_one_b import gpipe, interleaved_1f1b, looped_bfs, one_f_one_b

from titan_pipeline.families.zero_bubble import interleaved_zb, zb_h1, zb_h2, zbv  # isort: skip
from titan_pipeline.families.zb_auto import zb_auto  # isort: skip
from titan_pipeline.families.v_shaped import one_f_one_b_v, v_half, v_min  # isort: skip
from titan_pipeline.families.dualpipe import dualpipe_v  # isort: skip
from titan_pipeline.families.registry import (  # isort: skip
    FAMILIES,
    ScheduleFamily,
    build_schedule,
    find_family,
    load_installed_families,
    register_family,
)

__all__ = [
    "FAMILIES",
    "ScheduleFamily",
    "build_schedule",
    "dualpipe_v",
    "find_family",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zb",
    "load_installed_families",
    "looped_bfs",
    "one_f_one_b",
    "one_f_one_b_v",
    "register_family",
    "v_half",
    "v_min",
    "zb_auto",
    "zb_h1",
    "zb_h2",
    "zbv",
]
