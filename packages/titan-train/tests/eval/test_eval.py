"""Scores by hand, by ranks, and beside lm-evaluation-harness's own model on the export."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exported_runs import trained
from titan_testing import run_ranks
from titan_train.cli import main
from titan_train.eval.model import EvalModel, eval_model_of, load_eval_model
from titan_train.eval.perplexity import perplexity, rolling_windows, score
from titan_train.eval.ranks import Ranks, join_ranks
from titan_train.export import hf_folder
from titan_train.export.run import export_run
from titan_train.export.tokenizer_json import folder_text
from titan_train.generation import LoadedRun, load_run
from titan_train.tokenizers import ChatTemplate
from titan_train.tokenizers.chat_template import BUILT_IN

TEXTS = ["def f0(x):\n    return x + 3\n", "", "something that was never trained on: ü", "x" * 200]


def uniform(max_length: int = 16) -> EvalModel:
    return EvalModel(
        name="uniform", logits=lambda tokens: torch.zeros(*tokens.shape, 256), encode=lambda text: list(text.encode()),
        decode=lambda ids: bytes(ids).decode(), greedy=lambda prompt, count: [0] * count, prefix_id=0, eos_id=0,
        max_length=max_length,
    )  # fmt: skip


def test_a_uniform_model_needs_eight_bits_for_a_byte() -> None:
    found = perplexity(uniform(), TEXTS, batch_size=3, ranks=Ranks())
    assert found.bits_per_byte == pytest.approx(8.0, rel=1e-6)
    assert found.per_token == pytest.approx(256.0, rel=1e-5)
    assert found.tokens == found.bytes == sum(len(text.encode()) for text in TEXTS)
    with pytest.raises(ValueError, match="there is no text to evaluate"):
        perplexity(uniform(), [""], batch_size=3, ranks=Ranks())


def test_windows_score_each_token_once_and_see_what_the_harness_shows() -> None:
    ids = list(range(1, 36))
    windows = list(rolling_windows(ids, 99, 16))
    assert [token for _, part in windows for token in part] == ids
    assert [context for context, _ in windows] == [[99], [16], list(range(19, 33))]  # 14 + 3 - 1 = 16 tokens read
    assert list(rolling_windows(ids[:3], 99, 16)) == [([99], [1, 2, 3])]


def test_windows_are_those_of_the_harness() -> None:
    utils = pytest.importorskip("lm_eval.utils")
    for count in (0, 1, 15, 16, 17, 32, 35):
        ids = list(range(1, count + 1))
        cut = map(utils.make_disjoint_window, utils.get_rolling_token_windows(ids, 99, 16, 1))
        assert list(rolling_windows(ids, 99, 16)) == list(cut)


def test_settings_of_generation_are_read_as_the_harness_reads_them() -> None:
    pytest.importorskip("lm_eval")
    from titan_train.eval.harness import HarnessModel

    def answered(**settings: object) -> int:
        request = SimpleNamespace(args=("a", {"until": [], **settings}))
        return len(HarnessModel(uniform(512)).generate_until([request])[0])

    assert answered(max_completion_tokens=5) == 5
    assert answered(max_new_tokens=7, max_tokens=5, do_sample=False, temperature=1.0) == 7
    assert answered(max_gen_toks=9, max_new_tokens=7, temperature=0, num_beams=1) == 9
    assert answered() == 256
    for settings in ({"do_sample": True}, {"temperature": 0.7}, {"do_sample": False, "num_beams": 4}):
        with pytest.raises(ValueError, match="and evaluation takes the most likely token"):
            answered(**settings)


def test_ranks_exchange_documents_with_dates() -> None:
    pytest.importorskip("lm_eval")
    from titan_train.eval.harness import HarnessModel

    samples = {"task": [{"doc": {"day": date(2024, 5, 1), "n": 3}, "resps": [[(-1.5, True)]], 4: None}]}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        (found,) = HarnessModel(uniform(), ranks=Ranks(0, 2)).gather_object(samples)
    finally:
        torch.distributed.destroy_process_group()
    assert found == {"task": [{"doc": {"day": "2024-05-01", "n": 3}, "resps": [[(-1.5, True)]], 4: None}]}


def test_an_answer_ends_where_the_template_ends_it(
    loaded_run: Callable[..., LoadedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = loaded_run("gpt_debug")
    template = ChatTemplate.of(run.tokenizer, BUILT_IN["chatml"].replace("<|im_end|>", "<pad>"))
    asked: dict[str, Any] = {}

    def generate(model: Any, prompts: Any, **options: Any) -> list[list[int]]:
        asked.update(options)
        return [[]]

    monkeypatch.setattr("titan_train.eval.model.generate", generate)
    eval_model_of(replace(run, template=template, stop_ids=(7,)), "tiny").greedy([1], 2)
    assert asked["stop_ids"] == [run.tokenizer.eos_id, 7, run.tokenizer.pad_id]


def test_an_answer_ends_at_a_word_of_the_template(
    loaded_run: Callable[..., LoadedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    from titan_train.eval.harness import HarnessModel

    run = loaded_run("gpt_debug")
    template = ChatTemplate.of(run.tokenizer, BUILT_IN["chatml"])
    monkeypatch.setattr("titan_train.eval.model.generate", lambda *given, **options: [[*b"a<|im_end|>b"]])
    model = HarnessModel(eval_model_of(replace(run, template=template), "tiny"))
    requests = [SimpleNamespace(args=("q", {"max_gen_toks": 20, **until})) for until in ({"until": "b"}, {})]
    assert model.generate_until(requests) == ["a", "a"]


def test_scores_are_those_of_a_plain_forward_whatever_the_batch(folder: Path) -> None:
    run = load_run(trained(folder, "qwen3_debug", rope_theta=5000.0), device="cpu")
    model = eval_model_of(run, "tiny")
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randint(259, (c,), generator=generator).tolist(), torch.randint(259, (n,), generator=generator).tolist())
        for c, n in ((5, 3), (1, 1), (20, 7), (60, 10), (80, 2), (1, 64))
    ]
    want = []
    for context, continuation in pairs:
        row = [*context, *continuation][-65:]  # the model reads 64 and predicts the 65th
        with torch.no_grad():
            likely = run.model(torch.tensor([row[:-1]]))[0].double().log_softmax(-1)
        want.append(sum(float(likely[len(row) - 1 - len(continuation) + i, t]) for i, t in enumerate(continuation)))
    for batch_size in (1, 4):
        got = [likely for likely, _ in score(model, pairs, batch_size=batch_size)]
        assert got == pytest.approx(want, rel=1e-5)  # float32 logits of order one
    with pytest.raises(ValueError, match="a context of 0 and a continuation of 1"):
        score(model, [([], [1])], batch_size=1)


def test_an_export_with_a_published_tokenizer_reads_as_many_tokens_at_once_as_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    export_run(trained(folder, "qwen3_debug", rope_theta=5000.0), tmp_path / "first", gate=False)
    file = tmp_path / "first" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 32}))
    tokenizer = {"kind": "hf", "path": str(tmp_path / "first")}
    run_dir = trained(folder, "qwen3_debug", tokenizer=tokenizer, rope_theta=5000.0)
    export_run(run_dir, tmp_path / "second", gate=False)
    lengths = [load_eval_model(path, device="cpu").max_length for path in (run_dir, tmp_path / "second")]
    assert lengths == [64, 64]
    monkeypatch.setattr(hf_folder, "_published_length", lambda run: 4096)  # of a folder that the weights came from
    export_run(run_dir, tmp_path / "longer", gate=False)
    assert json.loads((tmp_path / "longer" / "config.json").read_text())["max_position_embeddings"] == 4096
    assert load_eval_model(tmp_path / "longer", device="cpu").max_length == 64
    config = tmp_path / "second" / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 64,', ""))
    assert load_eval_model(tmp_path / "second").max_length == 32
    file = tmp_path / "second" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": int(1e30)}))
    with pytest.raises(ValueError, match=r"does not say how many tokens its model reads at once\. Set --max-length"):
        load_eval_model(tmp_path / "second")
    (tmp_path / "second" / "export.json").write_text(
        '{"max_positions": null, "seq_len": 48}'
    )  # as onnx and aoti have it
    assert load_eval_model(tmp_path / "second").max_length == 48


@pytest.mark.parametrize("eos", [{"__type": "AddedToken", "content": "<eos>"}, None, "missing", "no file"])
def test_the_token_that_ends_a_text_is_found_however_a_published_folder_writes_it(
    eos: object, folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    export_run(trained(folder, "gpt_debug", steps=0), tmp_path / "out", gate=False)
    file = tmp_path / "out" / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"eos_token": eos}
    if eos == "missing":
        del config["eos_token"]
    file.write_text(json.dumps(config))
    if eos == "no file":
        file.unlink()
    model = load_eval_model(tmp_path / "out")
    assert (model.eos_id, model.prefix_id) == (257, 256)
    assert folder_text(tmp_path / "out", [*b" ab", 257, *b"c"]) == " ab"
    file.write_text(json.dumps(config | {"pad_token": "[PAD] of another vocabulary"}))
    assert folder_text(tmp_path / "out", [*b"ab"]) == "ab"


TASK = """
task: tiny_words
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: OUTPUT
doc_to_text: "{{question}}"
REST
metadata: {version: 1}
"""
CHOICES = 'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\nmetric_list: [{metric: acc}]'
TEXT = 'doc_to_target: "{{question}}"\nmetric_list: [{metric: bits_per_byte}]'
UNTIL = (
    'doc_to_target: "{{choices[0]}}"\ngeneration_kwargs: {until: ["\\n"], max_new_tokens: 12, do_sample: false, temperature: 1}\n'
    "metric_list: [{metric: exact_match}]"
)


def task_files(folder: Path) -> Path:
    docs = [
        {"question": f"def f{i}(x):", "choices": ["\n    return x", " + 3", " ü"], "answer": i % 3} for i in range(9)
    ]
    docs[8]["question"] += "\n    return x + 3" * 5  # longer than the model reads
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, output, rest in (
        ("tiny_choices", "multiple_choice", CHOICES),
        ("tiny_rolling", "loglikelihood_rolling", TEXT),
        ("tiny_until", "generate_until", UNTIL),
    ):
        text = TASK.replace("DATA", str(data)).replace("OUTPUT", output).replace("REST", rest)
        if output == "loglikelihood_rolling":
            text = text.replace('doc_to_text: "{{question}}"', 'doc_to_text: ""')
        (folder / f"{name}.yaml").write_text(text.replace("tiny_words", name))
    return folder


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> None:
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))


@pytest.mark.timeout(900)  # imports of the harness and its processes take minutes on a loaded machine
@pytest.mark.filterwarnings("ignore")
def test_tasks_score_each_request_as_the_harness_scores_the_export(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("transformers")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from titan_train.eval.harness import run_tasks

    run_dir = trained(folder, "qwen3_debug", data={"add_bos": True}, rope_theta=5000.0)
    export_run(run_dir, tmp_path / "hf", dtype="fp32", gate=False)
    (tmp_path / "tasks").mkdir()
    include = task_files(tmp_path / "tasks")
    tasks = ["tiny_choices", "tiny_rolling", "tiny_until"]
    model = eval_model_of(load_run(run_dir, device="cpu"), "tiny")
    ours = run_tasks(model, tasks, batch_size=4, ranks=Ranks(), include=include)
    theirs = simple_evaluate(
        model="hf", model_args={"pretrained": str(tmp_path / "hf"), "dtype": "float32", "max_length": 64}, tasks=tasks,
        task_manager=TaskManager(include_path=str(include)), device="cpu", bootstrap_iters=0, batch_size=1,
    )  # fmt: skip
    assert ours is not None
    assert theirs is not None
    for task in tasks:
        assert len(ours["samples"][task]) == 9
        for a, b in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            assert a["doc_id"] == b["doc_id"]
            mine, his = (numbers(sample["resps"]) for sample in (a, b))
            assert len(mine) > 0
            if task == "tiny_until":
                assert mine == his
            else:
                assert mine == pytest.approx(his, abs=1e-4)


def numbers(value: object) -> list[object]:
    """The leaves of nested lists; booleans as they are."""
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in numbers(item)]
    return [float(value)] if isinstance(value, str) and value[:1] in "-0123456789" else [value]


def named_on_ranks(run_dir: Path) -> str:
    with join_ranks() as ranks:
        return load_eval_model(run_dir, device="cpu", ranks=ranks).name


def test_ranks_pass_over_a_damaged_checkpoint_together(folder: Path, tmp_path: Path) -> None:
    run_dir = trained(folder, "gpt_debug", run="twice", steps=2, checkpoint={"every": 1})
    run_dir = shutil.copytree(run_dir, tmp_path / "run")
    file = next((run_dir / "checkpoints" / "step-00000002").glob("model-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert run_ranks(named_on_ranks, 2, run_dir) == ["run, step 1"] * 2


def test_the_command_gives_the_same_for_a_run_its_export_and_two_ranks(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    run_dir = trained(folder, "qwen3_debug", rope_theta=5000.0)
    export_run(run_dir, tmp_path / "hf", dtype="fp32", gate=False)
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    found = []
    for name, target in (("run", run_dir), ("export", tmp_path / "hf")):
        assert main(["eval", str(target), "--text", str(lines), "--json", str(tmp_path / f"{name}.json")]) == 0
        found.append(json.loads((tmp_path / f"{name}.json").read_text())["text"])
    assert "bits per byte" in capsys.readouterr().out
    words = ["eval", str(run_dir), "--text", str(lines), "--batch-size", "1", "--json", str(tmp_path / "ranks.json")]
    assert run_ranks(main, 2, words) == [0, 0]
    found.append(json.loads((tmp_path / "ranks.json").read_text())["text"])
    for other in found[1:]:
        assert other["tokens"] == found[0]["tokens"]
        assert other["nats"] == pytest.approx(found[0]["nats"], rel=1e-5)  # float32, other batches
    assert math.isclose(found[0]["perplexity"], math.exp(found[0]["nats"] / found[0]["tokens"]))
    assert main(["eval", str(run_dir)]) == 2
    assert "there is nothing to evaluate" in capsys.readouterr().err
