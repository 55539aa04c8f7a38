"""Every published schedule this package can generate.

`build_schedule(name, …)` makes any of them by name; `FAMILIES` lists what each needs.
"""

from titan_pipeline.families._one_f_one_b import gpipe, interleaved_1f1b, looped_bfs, one_f_one_b
from titan_pipeline.families._registry import FAMILIES, Family, build_schedule
from titan_pipeline.families._v_shaped import one_f_one_b_v, v_half, v_min
from titan_pipeline.families._zb_auto import zb_auto
from titan_pipeline.families._zero_bubble import dualpipe_v, interleaved_zb, zb_h1, zb_h2, zbv

__all__ = [
    "FAMILIES",
    "Family",
    "build_schedule",
    "dualpipe_v",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zb",
    "looped_bfs",
    "one_f_one_b",
    "one_f_one_b_v",
    "v_half",
    "v_min",
    "zb_auto",
    "zb_h1",
    "zb_h2",
    "zbv",
]
