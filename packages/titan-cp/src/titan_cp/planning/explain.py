"""A plan in words and numbers, for people."""

from titan_cp.planning.numbers import PlanNumbers


def explain_plan(plan: PlanNumbers) -> str:
    """Every number of a plan that decides whether it is a good one, one line each."""
    costs = plan.costs
    padding = plan.pad_to - plan.seq_len
    documents = len(plan.cu_seqlens) - 1 - bool(padding)
    dtype = str(plan.dtype).removeprefix("torch.")
    kept = costs.saved_bytes
    forward, backward = size_text(kept + costs.forward_buffer_bytes), size_text(kept + costs.backward_buffer_bytes)
    least, most = count_text(min(plan.work)), count_text(max(plan.work))
    degrees = f" (Ulysses {plan.ulysses_degree} × ring {plan.ring_degree})" if plan.method == "usp" else ""
    mask = ("causal" if plan.causal else "full") + (f", window {plan.window}" if plan.window is not None else "")
    kv_heads = f"{plan.num_kv_heads} KV"
    shares = plan.head_shares
    if shares.num_heads != plan.num_heads:
        kv_heads += (
            f" (exchanged as {shares.num_heads} and {shares.num_kv_heads}, with heads of zeros: {plan.ulysses_degree} ranks "
            f"do not divide {plan.num_heads})"
        )
    elif shares.num_kv_heads != plan.num_kv_heads:
        kv_heads += f" (repeated to {shares.num_kv_heads} so that each rank has whole heads)"
    crossover = plan.crossover_size
    lines = [
        f"sequence    {plan.seq_len} tokens, {documents} document{'s' * (documents > 1)}, {mask}"
        + (f"; padded by {padding} to {plan.pad_to}" if padding else ""),
        f"ranks       {plan.size}, {plan.local_len} tokens each",
        f"heads       {plan.num_heads} query, {kv_heads}, {plan.head_dim} channels, {dtype}",
        f"method      {plan.method}{degrees}: {plan.reasons[0]}",
        f"layout      {plan.layout}: {plan.reasons[1]}",
        f"sent        {size_text(costs.forward_bytes)} forward, {size_text(costs.backward_bytes)} backward",
        f"kept        {size_text(kept)} from forward to backward",
        f"peak        {forward} forward, {backward} backward (estimate: kept + buffers)",
        f"work        {least} to {most} pair-heads per rank, imbalance {plan.imbalance:.3f}",
    ]
    if plan.method in ("ring", "usp") and plan.ring_degree > 1:
        lines.append(f"ring        {_ring_line(plan)}")
    lines.append(
        f"crossover   Ulysses sends less than the full ring from {crossover} ranks on"
        if crossover
        else "crossover   Ulysses never sends less than the full ring with these heads"
    )
    lines.append("            (bytes are per rank, one layer, one batch row)")
    return "\n".join(lines)


def _ring_line(plan: PlanNumbers) -> str:
    if plan.direct:
        others = plan.pad_to - plan.ring_len
        most, mean = max(plan.sent_rows), sum(plan.sent_rows) / plan.ring_degree
        return (
            f"keys go straight to the ranks that see them, in {len(plan.rounds)} rounds: {mean / others:.2%} of the others' "
            f"on average, {most / others:.2%} from the busiest rank"
        )
    return (
        f"{plan.hops} of {plan.ring_degree - 1} hops needed; imbalance if ranks wait at each step "
        f"{plan.step_imbalance:.3f}"
    )


def size_text(count: int) -> str:
    """Bytes in the unit that reads best."""
    return (
        f"{count / 2**20:.2f} MiB" if count >= 2**20 else f"{count / 2**10:.2f} KiB" if count >= 2**10 else f"{count} B"
    )


def count_text(count: float) -> str:
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{count / factor:.2f}{unit}"
    return f"{count:g}"
