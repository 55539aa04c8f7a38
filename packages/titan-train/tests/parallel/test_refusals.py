import pytest
from refusals import REFUSALS, reason


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.what)
def test_what_cannot_work_is_refused_with_a_way_out(refusal):
    text = reason(refusal)
    assert any(
        word in text for word in ("Use ", "Set ", "use ", "set ", "Nearest", "nearest", "Lower", "Leave", "Make ")
    )
