import pytest
from titan_testing import preload

preload("titan_train.train.trainer")


@pytest.fixture(autouse=True, scope="session")
def state_of_the_account(tmp_path_factory):
    """What the account remembers of the runs of these tests is not the account's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
