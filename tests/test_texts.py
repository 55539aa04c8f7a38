"""A change of wording is seen in review: the texts of the source and the help pages are kept beside the tests."""

import difflib

import pytest
import texts


@pytest.mark.parametrize("name", sorted(texts.all_texts()))
def test_texts_are_those_that_were_reviewed(name):
    kept = texts.KEPT / name
    now = texts.all_texts()[name]
    was = kept.read_text(encoding="utf-8") if kept.is_file() else ""
    changes = "\n".join(difflib.unified_diff(was.splitlines(), now.splitlines(), "reviewed", "now", lineterm="", n=1))
    assert now == was, f"run `python tests/texts.py`, read the diff of {name}, and commit it:\n{changes}"
