"""Text that comes in pieces: stop words across tokens, several rows, conversations."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from titan_train import generation
from titan_train.cli import main
from titan_train.cli.generate import _stop_word
from titan_train.data.sources.chat import Conversations, encode_conversation
from titan_train.generation import (
    LoadedRun,
    Sampling,
    StopWords,
    encode_chat,
    encode_prompt,
    generate,
    stream_text,
)
from titan_train.tokenizers import ChatTemplate
from titan_train.tokenizers.chat_template import BUILT_IN
from torch import Tensor, nn
from torch.nn.functional import one_hot


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


def test_a_prompt_begins_as_documents_do(run: LoadedRun) -> None:
    begun = replace(run, begin_ids=(run.tokenizer.bos_id,))
    assert encode_prompt(begun, "hi") == [run.tokenizer.bos_id, *encode_prompt(run, "hi")] == [256, *b"hi"]
    assert encode_chat(begun, [{"role": "user", "content": "hi"}])[0] != 256  # a template writes its own
    with pytest.raises(ValueError, match="the prompt is empty"):
        encode_prompt(begun, "")


def test_a_conversation_is_written_by_the_template(run: LoadedRun) -> None:
    assert run.tokenizer.decode(encode_chat(run, [{"role": "user", "content": "hi"}])) == "<user>hi<assistant>"
    bare = LoadedRun(run.config, run.model, run.tokenizer, 0)
    with pytest.raises(ValueError, match="this run has no chat template"):
        encode_chat(bare, [{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="a stop word is empty"):
        StopWords(["a", ""])


def test_a_conversation_is_encoded_as_those_that_were_trained_on(run: LoadedRun) -> None:
    tokenizer = run.tokenizer
    template = ChatTemplate.of(tokenizer, BUILT_IN["plain"])
    assert template is not None
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    whole = Conversations.of(tokenizer, template).document([*talk, {"role": "assistant", "content": "d"}], {}, 1)
    trained = (encode_conversation(whole, tokenizer) % tokenizer.vocab_size).tolist()
    chatting = replace(run, template=template)
    ids = encode_chat(chatting, talk)
    assert tokenizer.eos_id in ids
    assert ids == trained[: len(ids)]
    with pytest.raises(ValueError, match="which are not characters"):
        encode_chat(chatting, [{"role": "user", "content": "\ufdd0"}])


class Says(nn.Module):
    """Stands where a model does, and always gives the same tokens."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__()
        self.ids = ids
        self.place = nn.Parameter(torch.empty(0))

    def new_decoder(self) -> Callable[[nn.Module, Tensor, Tensor, int], Tensor]:
        return lambda _model, _tokens, _lengths, step: one_hot(torch.tensor([self.ids[step]]), 259).float()


def said(run: LoadedRun, **options: Any) -> tuple[str, str]:
    pieces = list(stream_text(run, [[1]], max_new_tokens=20, sampling=Sampling(), **options))
    return "".join(piece.text for piece in pieces), pieces[-1].finish


def test_an_answer_ends_where_the_template_ends_it_and_a_text_does_not(run: LoadedRun) -> None:
    tokenizer = run.tokenizer
    by_text = ChatTemplate.of(tokenizer, BUILT_IN["chatml"])
    by_token = ChatTemplate.of(tokenizer, BUILT_IN["chatml"].replace("<|im_end|>", "<pad>"))
    texts = [*b"yes<|im_end|>\nand more ..."]
    tokens = [*b"yes", tokenizer.pad_id, *b"\nand more words ..."]
    for ids, template in ((texts, by_text), (tokens, by_token)):
        chatting = replace(run, model=Says(ids), template=template)
        assert said(chatting, chat=True) == ("yes", "stop")
        assert said(chatting)[1] == "length"
    assert said(replace(run, model=Says(texts), template=None), chat=True, stop=["es"]) == ("y", "stop")
    assert said(replace(run, model=Says(texts), stop_ids=(ord("<"),))) == ("yes", "stop")


def test_rows_that_have_all_ended_are_not_continued(run: LoadedRun) -> None:
    eos = run.tokenizer.eos_id
    steps: list[int] = []

    def decoder(_model: nn.Module, _tokens: Tensor, _lengths: Tensor, step: int) -> Tensor:
        steps.append(step)
        return one_hot(torch.tensor([[*b"ab........"][step], [*b"x", eos, *b"........"][step]]), 259).float()

    model = Says([])
    model.new_decoder = lambda: decoder
    answers = replace(run, model=model)
    found = list(stream_text(answers, [[1], [1]], max_new_tokens=10, sampling=Sampling(), stop=["b.", "xyz"]))
    for row, text, tokens in ((0, "a", 3), (1, "x", 1)):
        mine = [piece for piece in found if piece.row == row]
        assert "".join(piece.text for piece in mine) == text
        assert [piece.finish for piece in mine] == [""] * (len(mine) - 1) + ["stop"]
        assert mine[-1].tokens == tokens
    assert steps == [0, 1, 2]


def test_a_message_is_answered_up_to_the_end_of_the_turn(
    run: LoadedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chatting = replace(
        run, model=Says([*b"yes<|im_end|>\nand"]), template=ChatTemplate.of(run.tokenizer, BUILT_IN["chatml"])
    )
    monkeypatch.setattr(generation, "load_run", lambda *_, **__: chatting, raising=False)
    command = ["generate", str(tmp_path), "--prompt", "hi", "--max-new-tokens", "16", "--temperature", "0"]
    assert main([*command, "--chat"]) == 0
    assert capsys.readouterr().out == "yes\n"
    assert main(command) == 0
    assert capsys.readouterr().out == "hiyes<|im_end|>\nan\n"
    assert _stop_word(r"\n\t\\n\\\n\d") == "\n\t" + r"\n" + "\\\n" + r"\d"
    assert main([*command, "--stop", r">\na"]) == 0  # as a shell passes ">\na"
    assert capsys.readouterr().out == "hiyes<|im_end|\n"


def test_options_that_an_exported_folder_would_ignore_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "model.onnx").touch()
    command = ["generate", str(tmp_path), "--prompt", "hi", "--temperature", "0"]
    for option, value in (("--samples", "2"), ("--repetition-penalty", "1.2"), ("--step", "0"), ("--code", "mine")):
        assert main([*command, option, value]) == 2
        assert f"{option} is for a run's folder, and {tmp_path} is an exported one" in capsys.readouterr().err


@pytest.mark.slow
def test_a_compiled_step_gives_the_same_tokens(run: LoadedRun) -> None:
    prompts = [encode_prompt(run, text) for text in ("def f(", "hello there")]
    plain = generate(run.model, prompts, max_new_tokens=24)
    assert generate(run.model, prompts, max_new_tokens=24, compiled=True) == plain
