"""Zero-bubble schedules with a closed form: ZB-H1, ZB-H2, interleaved ZB and ZB-V.

Splitting a backward into I (gradient of the input, on the critical path) and W (gradient of the weights, needed by
nobody until the step ends) lets W fill the holes that 1F1B leaves (Qi et al., "Zero Bubble Pipeline Parallelism",
arXiv 2401.10241). p ranks, v chunks, m microbatches, times of a whole rank, memory in microbatches of a rank:

==============  ================================  ============================
schedule        bubble                            peak memory
==============  ================================  ============================
zb_h1           (p-1)(T_F+T_B-T_W)                p
zb_h2           (p-1)(T_F+T_B-2T_W) (*)           2p - 1
interleaved_zb  (p-1)(T_F+T_B-T_W)/v              p
zbv             0 if T_F = T_B = T_W (*)          p
==============  ================================  ============================

(*) stage bubble; the makespan adds the time until the last rank starts.
"""

from titan_pipeline.families.one_f_one_b import Program, group_sizes, grouped_orders
from titan_pipeline.families.registry import register_family
from titan_pipeline.ir.placement import loop_placement, v_placement
from titan_pipeline.ir.schedule import Kind, Schedule, schedule_from_programs


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B's forwards and memory, with rank ``r`` always ``r`` weight gradients behind."""
    programs: list[Program] = []
    for r in range(num_ranks):
        warm_up = min(num_ranks - 1 - r, num_microbatches)
        programs.append(_delayed(r, num_microbatches, warm_up, r, forward_first=True))
    return schedule_from_programs("zb_h1", num_microbatches, loop_placement(num_ranks), programs)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Twice 1F1B's memory: rank ``r`` starts with ``2(p-r)-1`` forwards and stays ``2r`` weight gradients behind."""
    programs: list[Program] = []
    for r in range(num_ranks):
        warm_up = min(2 * (num_ranks - r) - 1, num_microbatches)
        programs.append(_delayed(r, num_microbatches, warm_up, 2 * r, forward_first=False))
    return schedule_from_programs("zb_h2", num_microbatches, loop_placement(num_ranks), programs)


def _delayed(stage: int, m: int, warm_up: int, lag: int, *, forward_first: bool) -> Program:
    """``warm_up`` forwards, then F and I in turn, each I followed by the W of ``lag`` microbatches before."""
    program: Program = [(Kind.F, stage, mb) for mb in range(warm_up)]
    forward = warm_up
    for mb in range(m):
        if forward_first and forward < m:
            program.append((Kind.F, stage, forward))
            forward += 1
        program.append((Kind.I, stage, mb))
        if mb >= lag:
            program.append((Kind.W, stage, mb - lag))
        if not forward_first and forward < m:
            program.append((Kind.F, stage, forward))
            forward += 1
    return program + [(Kind.W, stage, mb) for mb in range(max(m - lag, 0), m)]


def interleaved_zb(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Interleaved order with ``(v-1)p + p-1-r`` warm-up forwards and delayed weight gradients: p M_B for any v.

    With T_F = T_B = T_W its makespan is the lower bound: the best choice when the step ends with a clip.
    Any number of microbatches; p M_B is the peak for a multiple of ``num_ranks``, other numbers hold more.
    """
    p, v = num_ranks, num_chunks
    group = max(group_sizes(p, num_microbatches))
    programs: list[Program] = []
    for r in range(p):
        forwards, gradients = grouped_orders(r, p, num_microbatches, v, Kind.I)
        warm_up = min((v - 1) * group + p - 1 - r, len(forwards))
        program = forwards[:warm_up]
        for k, (_, stage, mb) in enumerate(gradients):
            program += forwards[warm_up + k : warm_up + k + 1]
            program.append((Kind.I, stage, mb))
            if k >= r:
                program.append((Kind.W, *gradients[k - r][1:]))
        program += [(Kind.W, *g[1:]) for g in gradients[max(len(gradients) - r, 0) :]]
        programs.append(program)
    return schedule_from_programs("interleaved_zb", num_microbatches, loop_placement(p, v), programs)


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: two chunks in a V, p M_B on every rank, no stage bubble for equal times.

    The turn at the last rank needs no communication, and the loss sits on rank 0. Fewer than ``2p-1`` microbatches run
    the same order with the missing ones left out.
    """
    p, m = num_ranks, num_microbatches
    n = max(2 * p - 1, m)
    programs: list[Program] = []
    for r in range(p):
        first, last = r, 2 * p - 1 - r
        count: dict[tuple[Kind, int], int] = {}
        program: Program = []

        def run(
            *steps: tuple[Kind, int],
            times: int = 1,
            count: dict[tuple[Kind, int], int] = count,
            program: Program = program,
        ) -> None:
            for _ in range(times):
                for step in steps:
                    mb = count.get(step, 0)
                    count[step] = mb + 1
                    if mb < m:
                        program.append((*step, mb))

        f0, i0, w0 = (Kind.F, first), (Kind.I, first), (Kind.W, first)
        f1, i1, w1 = (Kind.F, last), (Kind.I, last), (Kind.W, last)
        run(f0, times=2 * (p - r) - 1)
        run(f1, f0, times=r)
        run(f1, i1, w1, times=p - r)
        while count[f1] < count[f0] or count[f0] < n:  # steady
            if count[f0] < n:
                run(f0)
            run(i0, w0, f1, i1, w1)
        run(i0, i1, times=r)
        run(i0, w0, times=p - r)
        run(w1, times=n - count[w1])
        run(w0, times=n - count[w0])
        programs.append(program)
    return schedule_from_programs("zbv", m, v_placement(p), programs)


register_family("zb_h1", zb_h1, splits_backward=True, summary="zero bubble with the memory of 1F1B")
register_family("zb_h2", zb_h2, splits_backward=True, summary="zero bubble with twice the memory of 1F1B")
register_family(
    "interleaved_zb",
    interleaved_zb,
    chunks=(1, None),
    splits_backward=True,
    summary="zero bubble over several chunks per rank",
)
register_family("zbv", zbv, chunks=(2, 2), splits_backward=True, summary="zero bubble on a V")
