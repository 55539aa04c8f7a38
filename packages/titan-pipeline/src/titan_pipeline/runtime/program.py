"""One rank's part of a schedule, in the form that the executor walks."""

from collections.abc import Sequence

from titan_pipeline.ir.lower import lower
from titan_pipeline.ir.schedule import COMPUTE, SENDS, Kind, Schedule, transfer_of
from titan_pipeline.runtime.stage.tied import TiedWeight, tied_messages
from titan_pipeline.runtime.transport.messages import Key


class Program:
    """One rank's program, and what it means for the transport."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        place = schedule.placement
        self.num_microbatches = schedule.num_microbatches
        self.num_stages = schedule.num_stages
        self._written = schedule.ranks[rank]
        receives = (Kind.RECV_F, Kind.RECV_B)
        computed = {a.stage: i for i, a in enumerate(self._written) if a.kind in COMPUTE}
        last = {a.stage: i for i, a in enumerate(self._written) if a.kind not in receives}
        # Receives happen where their message is needed. After the last action of a stage, its sends included so that no
        # rank waits for a reduction, comes an entry of kind None: its gradients are complete.
        self.actions: list[tuple[Kind | None, int, int]] = []
        self._positions: list[int] = []
        for i, action in enumerate(self._written):
            if action.kind in receives:
                continue
            self.actions.append(action)
            self._positions.append(i)
            if last[action.stage] == i:
                self.actions.append((None, action.stage, action.microbatch))
                self._positions.append(computed[action.stage])
        self.local = [place[s] == place[s + 1] for s in range(schedule.num_stages - 1)]
        self.place = place
        self.expected: dict[int, list[Key]] = {}
        self.sends: dict[int, int] = {}
        for action in schedule.ranks[rank]:
            if action.kind in COMPUTE:
                continue
            source, target, what = transfer_of(action)
            if action.kind in SENDS:
                self.sends[place[target]] = self.sends.get(place[target], 0) + 1
            else:
                key = (0 if what is Kind.F else 1, target, action.microbatch)
                self.expected.setdefault(place[source], []).append(key)

    def where(self, entry: int) -> tuple[int, str]:
        """Position and name of the action of an entry; ``(-1, "")`` outside of the program."""
        if entry < 0:
            return -1, ""
        position = self._positions[entry]
        after = "the reduction after " if self.actions[entry][0] is None else ""
        return position, after + str(self._written[position])

    def traffic_with(self, tied: Sequence[TiedWeight], rank: int) -> tuple[dict[int, list[Key]], dict[int, int]]:
        """What a training step receives and sends, the gradients of tied weights included."""
        more, targets = tied_messages(tied, self.place, rank)
        expected = {r: self.expected.get(r, []) + more.get(r, []) for r in {*self.expected, *more}}
        sends = dict(self.sends)
        for target in targets:
            sends[target] = sends.get(target, 0) + 1
        return expected, sends


def compile_program(schedule: Schedule, rank: int) -> Program:
    """The program of one rank; communication is added where the schedule has none."""
    return Program(schedule if schedule.communicates else lower(schedule), rank)
