"""Chats: ids and labels as transformers gives them, packed whole, what is refused, what a training batch learns."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from titan_train.config import DataConfig, SourceConfig, TokenizerConfig
from titan_train.data import DataLoader, MalformedInputError, build_chat_template, build_datasets
from titan_train.data.sources.chat import Conversations, encode_conversation, messages_of, template_key
from titan_train.tokenizers import ByteTokenizer, ChatTemplate, HfTokenizer
from titan_train.tokenizers.chat_template import BUILT_IN

PLAIN = TokenizerConfig(kind="bytes", chat_template="plain")


def talk(*turns):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


TALKS = [
    talk("Hi", "Hello é", "Who?", "Me 👋\r\n\r\n"),
    [{"role": "system", "content": "S"}, *talk("  12345 ", "def f():\n\treturn 1")],
    talk("x" * 30, "y"),
]


CALL = {"role": "assistant", "content": "b", "tool_calls": [{"arguments": {"x": ["<eos>"]}}]}


def write_chats(path, talks, key="messages"):
    path.write_text("".join(json.dumps({key: messages}) + "\n" for messages in talks))
    return SourceConfig(name="chats", kind="jsonl", paths=(str(path),), messages_key=key)


def datasets(source, tmp_path, *, seq_len=64, tokenizer=None, config=PLAIN, **options):
    tokenizer = tokenizer or ByteTokenizer()
    data = DataConfig(sources=(source,), validation_fraction=0.0, **options)
    template = build_chat_template(config, tokenizer)
    train, _ = build_datasets(data, tokenizer, seq_len=seq_len, seed=0, cache_dir=tmp_path / "cache", template=template)
    return train


@pytest.fixture(scope="module")
def hf_tokenizer():
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([json.dumps(TALKS)] * 3 + ["Hello def return Hi " * 20], trainer)
    return HfTokenizer(
        made.to_str().encode(), {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"},
        chat_template=BUILT_IN["chatml"],
    )  # fmt: skip


@pytest.mark.parametrize("marked", [True, False])
def test_ids_and_learned_tokens_equal_those_of_transformers(hf_tokenizer, tmp_path, marked):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    source = BUILT_IN["chatml"]
    if not marked:
        source = source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    theirs = transformers.AutoTokenizer.from_pretrained(str(hf_tokenizer.save(tmp_path)))
    chats = Conversations.of(hf_tokenizer, ChatTemplate.of(hf_tokenizer, source))
    for messages in TALKS:
        expected = theirs.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            chat_template=BUILT_IN["chatml"],
        )
        stored = encode_conversation(chats.document(messages, {}, 1), hf_tokenizer)
        learned = stored < hf_tokenizer.vocab_size
        assert np.where(learned, stored, stored - hf_tokenizer.vocab_size).tolist() == list(expected["input_ids"])
        assert learned.astype(int).tolist() == list(expected["assistant_masks"])


def test_exactly_the_answers_are_labels_and_no_conversation_is_cut(tmp_path):
    rng = np.random.default_rng(0)
    talks = [
        talk(*("".join(rng.choice(list("abcd é"), size=rng.integers(1, 9))) for _ in range(2 * rng.integers(1, 3))))
        for _ in range(80)
    ]
    dataset = datasets(write_chats(tmp_path / "a.jsonl", talks), tmp_path, seq_len=128)
    found, tokenizer = [], ByteTokenizer()
    loader = DataLoader(dataset, global_batch=dataset.num_windows, prefetch=0, microbatch=dataset.num_windows)
    batch = next(iter(loader))
    for row in range(dataset.num_windows):
        bounds = sorted({int(b) for b in batch.cu_seqlens[row]})
        for start, end in itertools.pairwise(bounds):
            tokens, labels = batch.tokens[row, start:end], batch.labels[row, start:end]
            assert batch.positions[row, start:end].tolist() == list(range(end - start))
            text = tokenizer.decode(tokens.tolist())
            if not text:  # padding: no label
                assert (labels == -100).all()
                continue
            found.append((text.rstrip("\n"), tokenizer.decode(label for label in labels.tolist() if label >= 0)))
            assert (labels == 257).sum() == text.count("Assistant: ")  # each turn's end is learned
    expected = [
        (
            "\n".join(f"{'User' if i % 2 == 0 else 'Assistant'}: {m['content']}" for i, m in enumerate(messages)),
            "".join(m["content"] for m in messages if m["role"] == "assistant"),
        )
        for messages in talks
    ]
    assert sorted(found) == sorted(expected)


def test_a_conversation_longer_than_a_sample_fills_several_and_keeps_every_label(tmp_path):
    messages = talk("question", "a long answer " * 30)
    dataset = datasets(write_chats(tmp_path / "a.jsonl", [messages]), tmp_path, seq_len=50)
    assert dataset.num_windows > 5
    rows = sorted(dataset.rows(np.arange(dataset.num_windows)), key=lambda row: row.document_starts.size)
    learned = sum(int(row.learned[1:].sum()) for row in rows)
    assert learned == len(messages[1]["content"]) + 1  # and the end


def test_whole_rows_leave_less_padding_than_a_document(documents_dataset):
    cut, documents = documents_dataset(seq_len=64)
    whole, _ = documents_dataset(seq_len=64, whole=("a",), pad_id=10**6)
    texts = sorted(document.tolist() for document in documents)
    rows = whole.rows(np.arange(whole.num_windows))
    found, padded = [], []
    for row in rows:
        bounds = [0, *row.document_starts.tolist(), 65]
        parts = [row.tokens[a:b].tolist() for a, b in itertools.pairwise(bounds)]
        if row.learned is not None:
            padding = parts.pop()
            assert set(padding) == {10**6}
            padded.append(len(padding))
        found += parts
    assert sorted(found) == texts
    batch = whole.build_batch(np.arange(whole.num_windows), ignore_index=-100, samples_consumed=0)
    assert np.array_equal(batch.padding, batch.tokens == 10**6)
    assert cut.build_batch(np.arange(2), ignore_index=-100, samples_consumed=0).padding is None
    assert sorted(padded)[-2] < 40  # the longest document has 40 tokens; the last row ends where the source does
    assert whole.fingerprint != cut.fingerprint


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": []}, "no messages"),
        ({"messages": "Hi"}, "not a list of messages"),
        ({"text": "Hi"}, "no key 'messages'"),
        ({"messages": ["Hi"]}, "message 1 is str"),
        ({"messages": [{"content": "Hi"}]}, "message 1 has no role"),
        ({"messages": [{"role": "user"}]}, "message 1 (user) has no content"),
        ({"messages": [*talk("Hi"), {"from": "gpt", "value": None}]}, "message 2 (assistant) has no content"),
        (
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "id": 3}]},
            "message 2 (assistant) has no",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "content of type int"),
        ({"messages": talk("Hi")}, "nothing to learn"),
        ({"messages": talk("<eos>", "x")}, "message 1 contains the special token '<eos>'"),
        ({"messages": talk("a", "\ufdd0")}, "U+FDD0"),
        ({"messages": talk("a", "\ud800")}, "lone surrogate"),
        ({"messages": [{"from": ["human"], "value": "Hi"}, *talk("a", "b")]}, "message 1 has no role"),
        ({"messages": [*talk("a"), CALL]}, "message 2 contains the special token '<eos>'"),
        ({"messages": [*talk("a"), {"role": "assistant", "reasoning": "\ufdd0"}]}, "U+FDD0"),
        ({"messages": talk("a", "b"), "tools": [{"name": "<eos>"}]}, "tools contains the special token '<eos>'"),
        ({"messages": talk("a", "b"), "tools": ["f"]}, "tools is not a list of objects"),
        ({"messages": talk("a", "b"), "tools": "f(x)"}, "tools is not a list of objects"),
    ],
)
def test_a_bad_conversation_is_named_by_file_and_line(tmp_path, record, reason):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": talk("a", "b")}) + "\n" + json.dumps(record) + "\n")
    source = SourceConfig(name="chats", kind="jsonl", paths=(str(path),), messages_key="messages")
    with pytest.raises(MalformedInputError) as info:
        datasets(source, tmp_path)
    assert f"{path}, line 2" in str(info.value)
    assert reason in str(info.value)


def test_bad_conversations_are_kept_apart_if_asked(tmp_path):
    source = write_chats(tmp_path / "a.jsonl", [talk("a", "b"), [], talk("c", "d" * 60)])
    dataset = datasets(source, tmp_path, on_error="quarantine", max_bad_fraction=0.5)
    assert dataset.num_windows >= 1
    (kept,) = (tmp_path / "cache").glob("*/quarantine.jsonl")
    assert json.loads(kept.read_text())["kind"] == "bad_chat"


def test_messages_of_another_shape_and_tools_reach_the_template():
    source = "{{ tools | tojson }}{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    chats = Conversations(ChatTemplate(source, {}))
    messages = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    for tools in ([{"name": "f"}], '[{"name": "f"}]'):  # many data sets hold them as JSON text
        document = chats.document(messages, {"tools": tools}, 1)
        assert document.text == '[{"name": "f"}]user=a;assistant=b;'


IGNORES = (
    "{% for m in messages %}<start>{{ m.role }}\n{{ m['content'] | trim }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
MARKED = "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}<end>{% endgeneration %}{% endfor %}"


@pytest.mark.parametrize("ignores", [IGNORES, MARKED])
@pytest.mark.parametrize(
    "calls",
    [
        {"tool_calls": [{"type": "function", "function": {"name": "weather_of", "arguments": {}}}]},
        {"tool_calls": [{"name": "weather_of", "arguments": "{}"}]},
        {"function_call": {"name": "weather_of", "arguments": "{}"}},
    ],
)
def test_a_call_that_a_template_leaves_out_is_refused(ignores, calls):
    messages = [*talk("weather?", "Where?", "Here"), {"role": "assistant", **calls}]
    with pytest.raises(ValueError, match="message 4 calls the function 'weather_of', which the chat template does not"):
        Conversations(ChatTemplate(ignores, {})).document(messages, {}, 1)
    (key,) = calls
    writes = ignores.replace("<end>", "{{ m.%s | tojson if m.%s }}<end>" % (key, key))  # noqa: UP031
    document = Conversations(ChatTemplate(writes, {})).document(messages, {}, 1)
    start, end = document.spans[-1]
    assert "weather_of" in document.text[start:end]


def test_a_call_is_not_written_where_another_turn_names_its_function():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "search"}}]}
    with pytest.raises(ValueError, match="message 2 calls the function 'search'"):
        Conversations(ChatTemplate(IGNORES, {})).document([*talk("search it"), call], {}, 1)


def test_only_chats_that_are_written_in_another_way_prepare_tokens_anew():
    source = SourceConfig(name="chats", kind="jsonl", paths=("a",), messages_key="messages")
    chatml = ChatTemplate(BUILT_IN["chatml"], {})
    cases = [(source, chatml), (replace(source, messages_key="auto"), chatml), (source, ChatTemplate("own", {}))]
    assert ["records" in template_key(*case) for case in cases] == [False, True, True]
    assert "records" not in template_key(replace(source, messages_key="auto", stream=True), chatml)
    texts = [BUILT_IN["chatml"], "{{ messages[0].thinking }}"]
    keys = [template_key(source, ChatTemplate(text, {})) for text in texts]
    assert ["messages" in key for key in keys] == [False, True]
    with_tools = template_key(source, ChatTemplate(BUILT_IN["chatml"], {}, tool_use="x"))
    assert with_tools != keys[0] == template_key(source, ChatTemplate(BUILT_IN["chatml"], {}))


def test_conversations_that_were_prepared_ahead_stay_whole(tmp_path):
    expected = datasets(write_chats(tmp_path / "a.jsonl", TALKS), tmp_path)
    (manifest,) = (tmp_path / "cache").glob("*/manifest.json")
    tokens = SourceConfig(name="chats", kind="tokens", paths=(str(manifest.parent),))
    found = datasets(tokens, tmp_path)
    every = np.arange(expected.num_windows)
    assert found.num_windows == expected.num_windows
    assert [row.tokens.tolist() for row in found.rows(every)] == [row.tokens.tolist() for row in expected.rows(every)]
    assert datasets(replace(tokens, packing="cut"), tmp_path).fingerprint != found.fingerprint


def test_a_tokenizer_without_a_template_and_text_beside_chats(tmp_path):
    source = write_chats(tmp_path / "a.jsonl", TALKS)
    with pytest.raises(ValueError, match=r"has no chat template.*tokenizer\.chat_template"):
        datasets(source, tmp_path, config=TokenizerConfig(kind="bytes"))
    (tmp_path / "t.txt").write_text("plain text " * 50)
    text = SourceConfig(name="text", kind="text", paths=(str(tmp_path / "t.txt"),))
    data = DataConfig(sources=(text, replace(source, weight=1.0)), validation_fraction=0.0)
    tokenizer = ByteTokenizer()
    template = build_chat_template(PLAIN, tokenizer)
    train, _ = build_datasets(data, tokenizer, seq_len=64, seed=0, cache_dir=tmp_path / "cache", template=template)
    learned = [row.learned is None for row in train.rows(np.arange(40))]
    assert True in learned
    assert False in learned


def test_another_template_makes_other_shards(tmp_path):
    source = write_chats(tmp_path / "a.jsonl", TALKS)
    first = datasets(source, tmp_path)
    second = datasets(source, tmp_path, config=TokenizerConfig(kind="bytes", chat_template="chatml"))
    assert first.fingerprint != second.fingerprint


FORMS = {
    "messages": lambda q, a: {"messages": talk(q, a)},
    "sharegpt": lambda q, a: {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]},
    "prompt and completion": lambda q, a: {"prompt": q, "completion": a},
    "lists of messages": lambda q, a: {"prompt": talk(q), "completion": [{"role": "assistant", "content": a}]},
    "alpaca": lambda q, a: {"instruction": q, "input": "", "output": a},
}


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_records_of_every_usual_form_become_the_same_conversations(form, table, tmp_path):
    rows = [FORMS[form](q, a) for q, a in (("Hi", "Hello é"), ("Who?", "Me 👋"))]
    source = SourceConfig(name="chats", kind="jsonl", paths=(str(tmp_path / "chats.jsonl"),), messages_key="auto")
    if table:
        pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "chats.parquet")
        source = replace(source, kind="parquet", paths=(str(tmp_path / "chats.parquet"),))
    else:
        (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    want = write_chats(tmp_path / "want.jsonl", [talk("Hi", "Hello é"), talk("Who?", "Me 👋")])
    got, expected = (
        datasets(which, tmp_path / str(number), seq_len=128).rows(np.arange(1, dtype=np.int64))
        for number, which in enumerate((source, want))
    )
    assert got[0].tokens.tolist() == expected[0].tokens.tolist()
    assert got[0].learned.tolist() == expected[0].learned.tolist()


def test_the_input_of_alpaca_stands_below_its_instruction_and_other_records_are_named():
    record = {"instruction": "Add.", "input": "2 3", "output": "5", "system": "Be short."}
    assert messages_of(record) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Add.\n\n2 3"},
        {"role": "assistant", "content": "5"},
    ]
    shared = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "Be short."}
    assert messages_of(shared) == [{"role": "system", "content": "Be short."}, *shared["conversations"]]
    own = [{"from": "system", "value": "Be long."}, *shared["conversations"]]
    assert messages_of(shared | {"conversations": own}) == own
    developer = [{"role": "developer", "content": "Be long."}, *shared["conversations"]]
    assert messages_of(shared | {"conversations": developer}) == developer
    parts = [{"type": "text", "text": "Be short."}]
    assert messages_of(shared | {"system": parts})[0] == {"role": "system", "content": parts}
    for other in (True, 3, {"os": "linux"}, "", []):
        assert messages_of(shared | {"system": other}) == shared["conversations"]
    with pytest.raises(ValueError, match=r"instruction and output; it has \['question', 'reply'\]"):
        messages_of({"question": "a", "reply": "b"})
