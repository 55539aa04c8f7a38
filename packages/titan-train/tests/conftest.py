import sys

import pytest
from titan_testing import preload

preload("titan_train.train.trainer")


def pytest_collection_finish(session):
    """Where tests import transformers, so does the server of ranks: seconds in every rank that trains such a model otherwise."""
    if "transformers" in sys.modules:
        preload("transformers.modeling_utils", "transformers.models.auto.modeling_auto")


@pytest.fixture(autouse=True, scope="session")
def state_of_the_account(tmp_path_factory):
    """What the account remembers of the runs of these tests is not the account's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def loaded_run():
    """Make what `generate` and `serve` work on: a tiny model of a name, as if it was loaded at a step, and the byte tokenizer."""
    import torch
    from titan_train.config import parse_config
    from titan_train.config.model import ModelConfig
    from titan_train.generation import LoadedRun
    from titan_train.models import build_model, init_for
    from titan_train.tokenizers import ByteTokenizer, ChatTemplate

    def make(name, step=0):
        model = build_model(ModelConfig(name=name), vocab_size=259, device="cpu").requires_grad_(False).eval()
        init = init_for(model)
        for i, (fqn, parameter) in enumerate(model.named_parameters()):
            init(fqn, parameter.data, torch.Generator().manual_seed(i))
            parameter.data.mul_(4 if parameter.ndim > 1 else 1)  # logits that differ
        tokenizer = ByteTokenizer()
        words = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
        return LoadedRun(parse_config({}), model, tokenizer, step, ChatTemplate.of(tokenizer, words))

    return make
