"""A trained model continues a prompt about images: the same as in training, by the command and in a batch."""

from dataclasses import replace

import pytest
import torch
from titan_train.cli import main
from titan_train.config import parse_config
from titan_train.config.model import ModelConfig
from titan_train.generation import Sampling, generate, load_run, stream_text
from titan_train.generation.cache import supports_cache
from titan_train.models import build_model
from titan_train.report import build_report
from titan_train.tasks.vision.answers import guessed, score_answers
from titan_train.tasks.vision.batches import ImageTextBatches
from titan_train.tasks.vision.shapes import ShapeQuestions
from titan_train.tasks.vision.show import images_shown
from titan_train.train import Trainer

Image = pytest.importorskip("PIL.Image")
ARGS = {"dim": 32, "num_layers": 2, "head_dim": 16, "rope_row_pairs": 2, "rope_column_pairs": 2, "vision_dim": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two steps, with the answers it scored."""
    folder = tmp_path_factory.mktemp("seen")
    config = parse_config(
        {
            "run": {"dir": str(folder), "name": "run"},
            "model": {"name": "qwen3_vl_debug", "seq_len": 64, "args": ARGS},
            "tokenizer": {"kind": "bytes"},
            "vision": {"items": 40, "held_out": 12, "sample_answers": 12},
            "train": {"steps": 2, "global_batch": 2},
            "validation": {"every": 2, "steps": 1},
            "metrics": {"progress": "off"},
            "launch": {"device": "cpu"},
        }
    )
    with Trainer(config) as trainer:
        trainer.fit()
    return folder / "run"


@pytest.fixture(scope="module")
def seen(folder):
    """The run, with weights under which every image matters."""
    run = load_run(folder, device="cpu")
    generator = torch.Generator().manual_seed(5)
    for parameter in run.model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return run


@pytest.mark.parametrize("begin", [(), (256,)])
def test_the_first_token_is_the_likeliest_of_training_and_depends_on_the_image(begin, seen, tmp_path):
    args, seen = seen.model.args, replace(seen, begin_ids=begin)
    data = ShapeQuestions(8, args)
    batches = ImageTextBatches(data, seen.tokenizer, args, seq_len=64, seed=0, part="train", threads=1, begin=begin)
    greedy = Sampling(temperature=0.0)
    told = []
    for item in range(4):
        Image.fromarray(data.thumbnail(item)).save(tmp_path / f"{item}.png")
        batch = batches.batch_of([[item]])
        with torch.no_grad():
            logits = seen.model(*batch.inputs, **batch.keywords)[0]
        first = int((batch.target[0] >= 0).nonzero()[0])
        prompt, _ = data.texts(item)
        with images_shown(seen, [tmp_path / f"{item}.png"], [prompt]) as ids:
            row = batch.inputs[0][0, : first + 1].tolist()
            assert ids == [row]
            assert tuple(row[: len(begin)]) == begin
            found = seen.model(torch.tensor([row]))[0, -1]
            pieces = list(stream_text(seen, ids, max_new_tokens=3, sampling=greedy))
        assert (found - logits[first]).abs().max() <= 1e-4 * logits[first].abs().max()  # other lengths, other sums
        told.append(found)
        assert pieces[-1].finish
    assert (told[0] - told[2]).abs().max() > 1e-2
    assert seen.model.supports_kv_cache


def test_rows_of_a_batch_see_the_same_images(seen, tmp_path):
    data = ShapeQuestions(2, seen.model.args)
    for item in (0, 1):
        Image.fromarray(data.thumbnail(item)).save(tmp_path / f"{item}.png")
    shown = [tmp_path / "0.png", tmp_path / "1.png"]
    alone = []
    for prompt in ("How many?", "What?"):
        with images_shown(seen, shown, [prompt]) as ids:
            alone.append(seen.model(torch.tensor(ids))[0, -1])
    with images_shown(seen, shown, ["How many?", "What?"]) as ids:
        tokens = torch.zeros(2, max(map(len, ids)), dtype=torch.int64)
        for row, words in enumerate(ids):
            tokens[row, : len(words)] = torch.tensor(words)
        together = seen.model(tokens)
    for row, words in enumerate(ids):
        assert (together[row, len(words) - 1] - alone[row]).abs().max() <= 1e-4 * alone[row].abs().max()


@pytest.mark.parametrize("name", ["qwen3_vl_debug", "llama3_debug_vl", "gpt_debug_vl"])
def test_the_cache_gives_the_tokens_of_the_whole_sequence_for_prompts_of_any_length(name, seen, tmp_path):
    run = seen
    if name != "qwen3_vl_debug":
        config = ModelConfig(name=name, seq_len=64)
        model = build_model(config, vocab_size=320, device="cpu")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
        run = replace(seen, model=model)
    data = ShapeQuestions(2, run.model.args)
    for item in (0, 1):
        Image.fromarray(data.thumbnail(item)).save(tmp_path / f"{item}.png")
    shown, prompts = [tmp_path / "0.png", tmp_path / "1.png"], ["How many?", "What is there to be seen?", "?"]
    logits = {}
    with images_shown(run, shown, prompts) as ids:
        assert supports_cache(run.model)
        for cached in (True, False):
            kept = logits[cached] = []
            hook = run.model.lm_head.register_forward_hook(lambda *call, kept=kept: kept.append(call[-1][:, -1]))
            told = generate(run.model, ids, max_new_tokens=8, use_cache=cached)
            hook.remove()
            assert [len(row) for row in told] == [8] * 3
            logits[cached].append(torch.tensor(told).float())
    assert torch.equal(logits[True][-1], logits[False][-1])
    for fast, slow in zip(logits[True], logits[False], strict=True):
        assert (fast - slow).abs().max() <= 1e-4 * slow.abs().max()  # other lengths, other sums
    assert (logits[True][0][0] - logits[True][0][2]).abs().max() > 1e-2
    assert "rope" not in vars(run.model)


def test_an_answer_is_right_only_if_every_token_is_and_a_blind_model_guesses(seen):
    args = seen.model.args
    data = ShapeQuestions(40, args)
    batches = ImageTextBatches(data, seen.tokenizer, args, seq_len=64, seed=0, part="train", threads=1)

    class Knowing(torch.nn.Module):
        """Says the answer of the item in each row, with one wrong letter in row 1."""

        def __init__(self):
            super().__init__()
            self.anchor = torch.nn.Parameter(torch.zeros(1))

        def forward(self, tokens, **_):
            said = torch.cat((tokens[:, 1:], tokens[:, :1]), dim=1)
            for row, item in enumerate((0, 1, 2, 3)):
                document = batches.document(item)
                said[row, len(document.tokens) - 2] = int(document.tokens[-1])
            said[1, len(batches.document(1).tokens) - 4] = 7
            return torch.nn.functional.one_hot(said, 320).float()

    assert score_answers(Knowing(), batches, range(4), shuffled=False) == [True, False, True, True]
    assert 0.1 < guessed(batches, range(40)) < 0.5


def test_the_command_takes_images_and_refuses_what_cannot_work(folder, tmp_path, capsys):
    Image.new("RGB", (50, 30)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"nothing")
    ask = ["generate", str(folder), "--prompt", "How many?", "--max-new-tokens", "2"]
    assert main([*ask, "--image", str(tmp_path / "a.png"), "--samples", "2"]) == 0
    assert capsys.readouterr().out.count("How many?") == 2
    assert main(ask) == 0  # text alone
    assert main([*ask, "--image", str(tmp_path / "b.png")]) == 2
    assert "b.png: UnidentifiedImageError" in capsys.readouterr().err
    assert main([*ask, "--chat", "--image", str(tmp_path / "a.png")]) == 2


def test_the_report_shows_the_images_and_what_was_found(folder, tmp_path):
    page = build_report(folder, tmp_path / "report.html").read_text()
    assert "of 12 answers are right; " in page
    assert "with the image of another question" in page
    assert "data:image/png;base64," in page
