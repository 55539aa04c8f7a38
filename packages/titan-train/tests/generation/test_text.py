"""Text that comes in pieces: stop words across tokens, several rows, conversations."""

import itertools
from collections.abc import Callable

import pytest
from titan_train.generation import (
    LoadedRun,
    Sampling,
    StopWords,
    encode_chat,
    encode_prompt,
    generate,
    stream_text,
)


@pytest.fixture(scope="module")
def run(loaded_run: Callable[..., LoadedRun]) -> LoadedRun:
    return loaded_run("llama3_debug")


@pytest.mark.parametrize("words", [["abc"], ["aab", "ba"], ["b"], ["abab", "bb"], []])
def test_a_stop_word_is_found_however_the_text_is_cut(words: list[str]) -> None:
    for letters in itertools.product("abc", repeat=6):
        text = "".join(letters)
        ends = [text.find(word) for word in words if word in text]
        want = text[: min(ends)] if ends else text
        for first, second in itertools.combinations(range(7), 2):
            stop, got, found = StopWords(words), "", False
            for piece in (text[:first], text[first:second], text[second:]):
                if not found:
                    more, found = stop.push(piece)
                    got += more
                    assert want.startswith(got)
            assert got + ("" if found else stop.flush()) == want
            assert found == bool(ends)


def test_rows_of_a_batch_give_their_own_texts_and_end_for_their_own_reasons(run: LoadedRun) -> None:
    prompts = [encode_prompt(run, text) for text in ("def f(", "x", "hello there")]
    tokens = generate(run.model, prompts, max_new_tokens=40, stop_ids=[run.tokenizer.eos_id])
    whole = [run.tokenizer.decode(row) for row in tokens]
    word = whole[1][10:13]
    pieces = list(stream_text(run, prompts, max_new_tokens=40, sampling=Sampling(), stop=[word]))
    for row in range(3):
        mine = [piece for piece in pieces if piece.row == row]
        text = "".join(piece.text for piece in mine)
        assert text == whole[row].split(word)[0]
        assert [bool(piece.finish) for piece in mine] == [False] * (len(mine) - 1) + [True]
        stopped = word in whole[row] or len(tokens[row]) < 40
        assert mine[-1].finish == ("stop" if stopped else "length")


def test_a_conversation_is_written_by_the_template(run: LoadedRun) -> None:
    assert run.tokenizer.decode(encode_chat(run, [{"role": "user", "content": "hi"}])) == "<user>hi<assistant>"
    bare = LoadedRun(run.config, run.model, run.tokenizer, 0)
    with pytest.raises(ValueError, match="this run has no chat template"):
        encode_chat(bare, [{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="a stop word is empty"):
        StopWords(["a", ""])


@pytest.mark.slow
def test_a_compiled_step_gives_the_same_tokens(run: LoadedRun) -> None:
    prompts = [encode_prompt(run, text) for text in ("def f(", "hello there")]
    plain = generate(run.model, prompts, max_new_tokens=24)
    assert generate(run.model, prompts, max_new_tokens=24, compiled=True) == plain
