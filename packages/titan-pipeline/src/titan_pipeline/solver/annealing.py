"""Simulated annealing over the orders of forwards and input gradients."""

import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from titan_pipeline.analysis.bounds import Objective
from titan_pipeline.solver.orders import Decoded, Order, Problem


@dataclass(frozen=True, slots=True)
class SolveProgress:
    """Where a search stands."""

    elapsed_s: float
    tries: int
    best: float
    bound: float


class Annealing:
    """Simulated annealing over orders; see the module docstring."""

    def __init__(self, problem: Problem, objective: Objective, rng: random.Random) -> None:
        self.problem = problem
        self.rng = rng
        self.tries = 0
        self._span = objective == "stage_span"

    def run(
        self,
        starts: Iterable[list[Order]],
        deadline: float,
        max_tries: int | None,
        bound: float,
        progress: Callable[[SolveProgress], None] | None,
    ) -> Decoded | None:
        """Anneal from the better start until time, tries or the bound are reached."""
        began = time.monotonic()
        patience = [0.5] * self.problem.num_ranks
        scored: list[tuple[float, list[Order]]] = []
        for start in starts:
            scored.append((self._value(start, patience), start))
            if time.monotonic() >= deadline or (max_tries is not None and self.tries >= max_tries):
                break
        value, orders = min(scored, key=lambda s: s[0])
        if progress is not None and value < math.inf:
            progress(SolveProgress(0.0, self.tries, value, bound))
        if value == math.inf or deadline <= began:
            return self._record(orders, patience)
        best, best_orders, best_patience = value, [list(o) for o in orders], list(patience)
        budget = max(deadline - began, 1e-9)
        shown = began
        while best > bound * (1 + 1e-9) and (max_tries is None or self.tries < max_tries):
            now = time.monotonic()
            if progress is not None and now - shown >= 1:
                shown = now
                progress(SolveProgress(now - began, self.tries, best, bound))
            done = (now - began) / budget if max_tries is None else self.tries / max_tries
            # two coolings: the second starts from the best of the first
            phase = (2 * done) % 1
            heat = best * 0.004 * (1 - phase) ** 2 + 1e-12
            for _ in range(20):
                if time.monotonic() >= deadline:
                    return self._record(best_orders, best_patience)
                undo = self._move(orders, patience)
                new = self._value(orders, patience)
                if new <= value or (new < math.inf and self.rng.random() < math.exp((value - new) / heat)):
                    value = new
                    if value < best:
                        best, best_orders, best_patience = value, [list(o) for o in orders], list(patience)
                else:
                    undo()
            if value > best * 1.03:
                value, orders, patience = best, [list(o) for o in best_orders], list(best_patience)
        return self._record(best_orders, best_patience)

    def _value(self, orders: list[Order], patience: list[float]) -> float:
        self.tries += 1
        decoded = self.problem.decode(orders, patience)
        if decoded is None:
            return math.inf
        return decoded.span if self._span else decoded.makespan

    def _record(self, orders: list[Order], patience: list[float]) -> Decoded | None:
        return self.problem.decode(orders, patience, record=True)

    def _move(self, orders: list[Order], patience: list[float]) -> Callable[[], None]:
        """Change the orders in place; returns how to take it back."""
        rng, m = self.rng, self.problem.m
        rank = rng.randrange(len(orders))
        if rng.random() < 0.05:
            before = patience[rank]
            patience[rank] = rng.choice((0.0, 0.25, 0.5, 0.75, 1.0))

            def restore() -> None:
                patience[rank] = before

            return restore
        order = orders[rank]
        i = rng.randrange(len(order))
        step = rng.choice((-1, 1))
        j = i
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4, 6, 9))):
            k = j + step
            # one stage sees its microbatches in order
            if not 0 <= k < len(order) or order[k] // m == order[i] // m:
                break
            j = k
        order.insert(j, order.pop(i))

        def put_back() -> None:
            order.insert(i, order.pop(j))

        return put_back
