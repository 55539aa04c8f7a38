"""What each action waits for: the data edges that every schedule of a placement shares."""

from titan_pipeline.ir.schedule import Action, Kind


def producers(action: Action, num_stages: int) -> tuple[tuple[Action, ...], ...]:
    """The results ``action`` needs; each entry lists the alternatives that can provide it."""
    kind, s, mb = action
    if kind is Kind.F:
        return ((Action(Kind.F, s - 1, mb),),) if s > 0 else ()
    if kind is Kind.W:
        return ((Action(Kind.I, s, mb),),)
    needs: tuple[tuple[Action, ...], ...] = ((Action(Kind.F, s, mb),),)
    if s + 1 < num_stages:
        needs += ((Action(Kind.I, s + 1, mb), Action(Kind.B, s + 1, mb)),)
    return needs


def consumers(action: Action, num_stages: int) -> tuple[tuple[int, Kind, Kind], ...]:
    """Stages that wait for the result of ``action``, with the kinds of the send and of the receive between them."""
    kind, s, _ = action
    if kind is Kind.F and s + 1 < num_stages:
        return ((s + 1, Kind.SEND_F, Kind.RECV_F),)
    if kind in (Kind.I, Kind.B) and s > 0:
        return ((s - 1, Kind.SEND_B, Kind.RECV_B),)
    return ()


def transfer_of(action: Action) -> tuple[int, int, Kind]:
    """``(producer stage, consumer stage, F or B)`` of a communication action."""
    kind, s, _ = action
    if kind is Kind.SEND_F:
        return s, s + 1, Kind.F
    if kind is Kind.RECV_F:
        return s - 1, s, Kind.F
    if kind is Kind.SEND_B:
        return s, s - 1, Kind.B
    return s + 1, s, Kind.B
