"""A run continues on any other layout as if nothing had happened."""

import composition
import pytest
from composition_matrix import MODELS, TIED
from titan_testing import run_ranks

LAYOUTS = {
    "tied": (
        TIED,
        [
            (2, {"parallel": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}),
            (4, {"parallel": {"tp": 2, "cp": 2}}),
            (2, {"parallel": {"pp": 2}, "pipeline": {"schedule": "zbv"}}),
            (1, {}),
        ],
    ),
    "moe": (
        MODELS["moe"],
        [(4, {"parallel": {"ep": 2, "pp": 2}}), (2, {"parallel": {"ep": 2}}), (1, {})],
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.filterwarnings("ignore:.*random generators are reseeded")
def test_a_run_continues_on_other_layouts_with_the_losses_of_one_process(case, folder):
    model, layouts = LAYOUTS[case]
    want = run_ranks(composition.run, 1, folder, "single", model, init=False)[0][0]
    losses = []
    for number, (ranks, sections) in enumerate(layouts):
        arguments = (folder, case, model | sections, 2 * (number + 1))
        first, more = run_ranks(composition.continue_run, ranks, *arguments, timeout_s=120, init=ranks > 1)[0]
        assert first == 2 * number
        losses += more
    assert len(losses) == 2 * len(layouts)
    assert losses == pytest.approx(want[: len(losses)], abs=2e-6)
