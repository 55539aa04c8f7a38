"""What a folder of the hub says beside its weights."""

import pytest
from titan_train.serve.folder import stop_ids_of


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"generation_config.json": '{"eos_token_id": [7, 9]}', "config.json": '{"eos_token_id": 3}'}, (7, 9)),
        ({"generation_config.json": '{"eos_token_id": 7}'}, (7,)),
        ({"generation_config.json": '{"eos_token_id": null}', "config.json": '{"eos_token_id": [3]}'}, (3,)),
        ({"config.json": "{}"}, ()),
        ({}, ()),
    ],
)
def test_the_tokens_that_end_a_text_are_read(files, ids, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert stop_ids_of(tmp_path) == ids
