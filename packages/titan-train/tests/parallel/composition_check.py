"""Compare what ranks computed with what one process did."""

from dataclasses import dataclass

import composition
from titan_testing import run_ranks


@dataclass(frozen=True)
class Errors:
    """Largest differences from one process."""

    first_loss: float
    last_loss: float
    validation: float
    norm: float
    """Relative, of the first gradient norm."""
    gradient: float
    """Of the first step, over all parameters: the error over the parameter's largest gradient."""
    worst: str
    """The parameter with that error."""
    ranks_agree: bool
    """All ranks report the same bits of every loss."""


def compare(single, ranks):
    """Errors of one run."""
    losses, norms, validation, _ = ranks[0]
    want_losses, want_norms, want_validation, want_boxes = single
    want, got = composition.assemble([want_boxes]), composition.assemble([boxes for *_, boxes in ranks])
    assert want.keys() == got.keys(), f"parameters with gradients differ: {want.keys() ^ got.keys()}"
    largest = max(float(g.abs().max()) for g in want.values())
    floor = 0.01 * largest  # a parameter whose gradients are all but zero is judged by the others' size
    relative = {
        name: float((want[name] - got[name]).abs().max()) / max(float(want[name].abs().max()), floor) for name in want
    }
    worst = max(relative, key=relative.get)
    return Errors(
        first_loss=abs(losses[0] - want_losses[0]),
        last_loss=max(abs(a - b) for a, b in zip(losses, want_losses, strict=True)),
        validation=abs(validation[0] - want_validation[0]),
        norm=abs(norms[0] - want_norms[0]) / want_norms[0],
        gradient=relative[worst],
        worst=worst,
        ranks_agree=all(other[0] == losses for other in ranks),
    )


def failures(errors, *, float8):
    """Names of the errors above their tolerance."""
    limits = (
        {"first_loss": 5e-3, "last_loss": 3e-2, "validation": 3e-2, "norm": 2e-2, "gradient": 0.2}
        if float8
        else {"first_loss": 2e-6, "last_loss": 2e-5, "validation": 2e-5, "norm": 2e-6, "gradient": 4e-6}
    )
    over = [name for name, limit in limits.items() if not getattr(errors, name) <= limit]
    return over + ([] if errors.ranks_agree else ["ranks_agree"])


def assert_as_one_process(ranks, single):
    """Of a model in float32 that made a few steps: losses, norms, held-out loss and every gradient."""
    losses, norms, validation, captured = single
    for found, other_norms, held_out, _ in ranks:
        # the first loss and norm: float32 sums of some hundred terms of size 1 in another order
        assert abs(found[0] - losses[0]) <= 1e-6 * losses[0]
        assert abs(other_norms[0] - norms[0]) <= 1e-6 * norms[0]
        # three AdamW steps divide by small second moments and amplify that, as in test_matrix
        assert max(abs(a - b) for a, b in zip(found, losses, strict=True)) <= 2e-5
        assert abs(held_out[0] - validation[0]) <= 2e-5
    whole = composition.assemble([boxes for *_, boxes in ranks])
    expected = composition.assemble([captured])
    assert whole.keys() == expected.keys()
    assert all(gradient.any() for gradient in expected.values())
    for parameter, gradient in expected.items():
        assert (whole[parameter] - gradient).abs().max() <= 1e-6, parameter


def assert_continues(folder, base, first, then, until):
    """A run of ``until`` steps on 2 ranks continues on 4 under another layout, and bit by bit under its own.

    Args:
        folder: A private one.
        base: Sections of one process, which makes four steps.
        first: Sections of the run that is continued.
        then: Sections of 4 ranks.
        until: The step at which the first run stops.
    """
    continue_run = composition.continue_run
    whole = run_ranks(composition.run, 1, folder, "one", base, 4, timeout_s=170)[0][0]
    start, losses = run_ranks(continue_run, 2, folder / "a", "resumed", first, until, timeout_s=170)[0]
    begun, rest = run_ranks(continue_run, 4, folder / "a", "resumed", then, 4, timeout_s=170)[0]
    assert (start, begun) == (0, until)
    assert max(abs(a - b) for a, b in zip(losses + rest, whole, strict=True)) <= 5e-6
    same = run_ranks(composition.run, 2, folder / "b", "same", first, 4, timeout_s=170)[0][0]
    run_ranks(continue_run, 2, folder / "c", "resumed", first, until, timeout_s=170)
    _, again = run_ranks(continue_run, 2, folder / "c", "resumed", first, 4, timeout_s=170)[0]
    assert again == same[until:]
