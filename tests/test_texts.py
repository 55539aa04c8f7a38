"""A change of wording is seen in review: the help pages are kept beside the tests."""

import difflib

import pytest
import texts


@pytest.mark.parametrize("command", texts.SUBCOMMANDS)
def test_help_pages_are_those_that_were_reviewed(command):
    kept = texts.KEPT / f"help-{command}.txt"
    was, now = kept.read_text(encoding="utf-8"), texts.help_pages(command)
    changes = "\n".join(difflib.unified_diff(was.splitlines(), now.splitlines(), "reviewed", "now", lineterm="", n=1))
    assert now == was, f"run `python tests/texts.py`, read the diff of {kept.name}, and commit it:\n{changes}"


def test_the_page_for_those_who_come_from_another_trainer_has_the_table_of_the_errors():
    page = texts.COMING_FROM.read_text(encoding="utf-8")
    assert page == texts.with_table(page), "run `python tests/texts.py`"
