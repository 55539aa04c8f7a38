"""tokenizer.json: ids as the library gives them, text in and out, what is refused, what a folder keeps."""

import json
import shutil

import numpy as np
import pytest
from titan_train.config import DataConfig, TokenizerConfig
from titan_train.data import build_chat_template, build_tokenizer
from titan_train.data.sources.chat import Conversations
from titan_train.tokenizers import ChatTemplate, HfTokenizer, IncrementalDecoder, Tokenizer, load_tokenizer
from titan_train.tokenizers.chat_template import BUILT_IN
from titan_train.tokenizers.huggingface import adds_bos, ids_before_text

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HARD = [
    "", " ", "\n", "\r\n", "a\r\nb\rc", "\t\t  \n\n   x", "é e\u0301 \u0915\u094d\u0937",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466\U0001f3f3\ufe0f\u200d\U0001f308",
    "\0\x01\x7f\x85", "\u2581x\u00a0y\u200b",
    " " * 500, "1234567890" * 7, "def f(x):\n    return {x: '<|im_end|>'}\n", "\U0010ffff\ufeff", "<tool> <|im_start|>user",
]  # fmt: skip


@pytest.fixture(scope="module")
def byte_level(stdlib_texts):
    """A byte-level vocabulary with special tokens, an added token that is not special, truncation and padding."""
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        stdlib_texts[:6],
        trainers.BpeTrainer(
            vocab_size=700,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    made.add_tokens([tokenizers.AddedToken("<tool>", special=False, normalized=False)])
    made.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    made.enable_truncation(max_length=4)
    made.enable_padding(length=16)
    return made.to_str()


@pytest.fixture
def folder(tmp_path, byte_level):
    (tmp_path / "tokenizer.json").write_text(byte_level)
    config = {
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False},
        "pad_token": "<|endoftext|>",
        "chat_template": BUILT_IN["chatml"],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_ids_are_the_librarys_and_nothing_is_cut_padded_or_added(folder, byte_level):
    tokenizer = HfTokenizer.from_folder(folder)
    assert isinstance(tokenizer, Tokenizer)
    library = tokenizers.Tokenizer.from_str(byte_level)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    for text in HARD:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == library.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
        assert b"".join(tokenizer.token_bytes(int(i)) for i in ids) == text.encode()
        assert not set(ids.tolist()) & set(tokenizer.special_ids.values())
    assert [ids.tolist() for ids in tokenizer.encode_batch(HARD)] == [tokenizer.encode(t).tolist() for t in HARD]


def test_special_tokens_come_from_the_configuration_and_can_be_named(folder):
    tokenizer = HfTokenizer.from_folder(folder)
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id) == (2, 0, None)
    assert tokenizer.special_ids == {name: number for number, name in enumerate(SPECIAL)}
    assert tokenizer.token_bytes(tokenizer.eos_id) == b""
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eos_id]) == "a"
    named = HfTokenizer.from_folder(folder, eos_token="<|endoftext|>", bos_token="<|im_start|>")
    assert (named.eos_id, named.bos_id) == (0, 1)
    assert named.fingerprint != tokenizer.fingerprint
    with pytest.raises(ValueError, match=r"tokenizer.eos_token='<eot>' is not in the vocabulary"):
        HfTokenizer.from_folder(folder, eos_token="<eot>")


def test_marked_text_gives_special_tokens_and_the_characters_of_each(folder):
    tokenizer = HfTokenizer.from_folder(folder)
    text = "<|im_start|>é😀<|im_end|>"
    ids, offsets = tokenizer.encode_marked(text)
    assert (ids[0], ids[-1]) == (1, 2)
    assert offsets[0].tolist() == [0, 12]
    assert set(range(12, 14)) == {i for a, b in offsets[1:-1] for i in range(a, b)}
    assert 1 not in tokenizer.encode(text)


def test_a_saved_folder_gives_the_same_tokenizer_and_template(folder, tmp_path):
    tokenizer = HfTokenizer.from_folder(folder)
    saved = tokenizer.save(tmp_path / "saved")
    loaded = load_tokenizer(saved)
    assert loaded.kind == "hf"
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.chat_template == tokenizer.chat_template == BUILT_IN["chatml"]
    assert load_tokenizer(folder).fingerprint == tokenizer.fingerprint  # a bare folder with tokenizer.json
    (saved / "tokenizer.json").write_text((saved / "tokenizer.json").read_text().replace("Ġself", "Ġsfel"))
    with pytest.raises(ValueError, match=r"was changed after it was saved|cannot read"):
        load_tokenizer(saved)


def test_the_configuration_loads_it_with_its_template(folder):
    config = TokenizerConfig(kind="hf", path=str(folder), eos_token="<|endoftext|>")
    tokenizer = build_tokenizer(config, DataConfig())
    assert tokenizer.eos_id == 0
    template = build_chat_template(config, tokenizer)
    assert template is not None
    assert template.source == BUILT_IN["chatml"]
    plain = build_chat_template(TokenizerConfig(kind="hf", path=str(folder), chat_template="plain"), tokenizer)
    assert plain is not None
    assert plain.source == BUILT_IN["plain"]


def test_a_tokenizers_template_for_tools_is_taken_with_its_usual_one(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    both = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": both}))
    tokenizer = HfTokenizer.from_folder(folder)
    for template, texts in ((ChatTemplate.of(tokenizer), ["D", "T"]), (ChatTemplate.of(tokenizer, "X"), ["X", "X"])):
        assert template is not None
        assert [template.render([], tools=tools) for tools in (None, [{"name": "f"}])] == texts


def test_the_last_template_of_a_list_is_not_taken_for_the_default(folder):
    both = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    both.append({"name": "../out", "template": "O"})  # no name of a file
    tokenizer = HfTokenizer((folder / "tokenizer.json").read_bytes(), {"chat_template": both, "auto_map": {"A": "b.B"}})
    assert tokenizer.chat_template == "D"
    saved = tokenizer.save(folder / "saved")
    for again in (tokenizer, load_tokenizer(saved), load_tokenizer(load_tokenizer(saved).save(folder / "again"))):
        assert (again.chat_template, again.more_templates) == ("D", {"tool_use": "T"})
    assert not {"auto_map", "chat_template"} & json.loads((saved / "tokenizer_config.json").read_text()).keys()
    transformers = pytest.importorskip("transformers")
    assert transformers.AutoTokenizer.from_pretrained(saved).chat_template == {"default": "D", "tool_use": "T"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "cannot read it"),
        ("tokenizer.json", "\x80", "cannot read it"),
        ("tokenizer.json", "", "cannot read it"),
        ("tokenizer_config.json", "[1]", "not a JSON object"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", '{"eos_token": "</nothing>"}', "not in the vocabulary"),
        ("config.json", '{"vocab_size": 100}', "have no embedding"),
    ],
)
def test_a_bad_folder_is_refused_by_name(folder, name, content, message):
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        HfTokenizer.from_folder(folder)


def test_special_tokens_that_the_model_has_no_embedding_for_are_left_out(folder, tmp_path, byte_level):
    made = tokenizers.Tokenizer.from_str(byte_level)
    size = made.get_vocab_size()
    made.add_special_tokens(["<image_soft_token>"])
    (folder / "tokenizer.json").write_text(made.to_str())
    bare = HfTokenizer.from_folder(folder)
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": size}}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "<image_soft_token>"}))
    tokenizer = HfTokenizer.from_folder(folder)
    assert tokenizer.pad_id is None
    template = ChatTemplate(BUILT_IN["chatml"], {}, tokenizer.special_ids)
    saved = tokenizer.save(tmp_path / "saved")
    resumed = build_tokenizer(TokenizerConfig(kind="hf", path=str(saved)), DataConfig())
    for one in (tokenizer, load_tokenizer(saved), resumed):
        assert one.vocab_size == size
        assert one.fingerprint == tokenizer.fingerprint != bare.fingerprint
        assert "<image_soft_token>" not in one.special_ids
        with pytest.raises(ValueError, match="message 1 contains the special token '<image_soft_token>'"):
            Conversations.of(one, template).document([{"role": "user", "content": "<image_soft_token>"}], {}, 3)
        assert one.encode_marked("<tool> a<|im_end|>")[0][-1] == one.eos_id
        assert one.decode(one.encode("a <image_soft_token>")) == "a <image_soft_token>"
        with pytest.raises(
            ValueError, match=r"the special token '<image_soft_token>', which the model has no embedding for"
        ):
            one.encode_marked("a <image_soft_token>")
    made.add_tokens(["<ordinary>"])
    (folder / "tokenizer.json").write_text(made.to_str())
    with pytest.raises(ValueError, match=r"ids up to \d+ \('<ordinary>'\).*have no embedding"):
        HfTokenizer.from_folder(folder)


def test_a_folder_without_the_file_and_a_vocabulary_without_an_end_are_refused(tmp_path):
    from tokenizers import models

    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        HfTokenizer.from_folder(tmp_path)
    bare = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])).to_str()
    with pytest.raises(ValueError, match="names no token that ends a text"):
        HfTokenizer(bare.encode())


def test_a_lone_surrogate_is_refused(folder):
    tokenizer = HfTokenizer.from_folder(folder)
    for encode in (tokenizer.encode, tokenizer.encode_marked, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(UnicodeEncodeError):
            encode("a\ud800b")


@pytest.mark.parametrize("kind", ["byte_fallback", "word_piece", "no_decoder", "word_end"])
def test_streamed_bytes_are_the_decoded_text(kind, folder):
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    if kind == "byte_fallback":
        pieces = ["\u2581", "a", "\u2581a", "</s>", "\u2581\u2581"]
        vocab = {name: i for i, name in enumerate([*(f"<0x{i:02X}>" for i in range(256)), *pieces])}
        merges = [("\u2581", "\u2581"), ("\u2581", "a")]
        made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
        made.normalizer = normalizers.Replace(" ", "\u2581")
        made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
        made.add_tokens([tokenizers.AddedToken("\u2581\u2581", special=False, normalized=False)])  # as in Gemma's
        text = "a a  a é😀"
    elif kind == "no_decoder":
        made = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "word": 2}, unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        text = "a word a"
    elif kind == "word_end":
        vocab = {"a": 0, "b</w>": 1, "ab</w>": 2, "b": 3}
        made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b</w>")], end_of_word_suffix="</w>"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.decoder = decoders.BPEDecoder()
        text = "ab aab b"
    else:
        vocab = {"[UNK]": 0, "play": 1, "##ing": 2, "a": 3, "</s>": 4}
        made = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.decoder = decoders.WordPiece()
        text = "playing a"
    made.add_special_tokens(["</s>"])
    tokenizer = HfTokenizer(made.to_str().encode())
    decoder = IncrementalDecoder(tokenizer)
    streamed = "".join(decoder.push(int(i)) for i in tokenizer.encode(text)) + decoder.flush()
    assert streamed.strip() == tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_equal_those_of_transformers(folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(shutil.copytree(folder, folder / "copy")))
    tokenizer = HfTokenizer.from_folder(folder)
    for text in HARD:
        given = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert tokenizer.encode(text).tolist() == list(given)


@pytest.mark.parametrize(
    ("single", "settings", "documents"),
    [
        ("<|im_start|> $A", {}, True),
        ("<|im_start|> $A <|endoftext|>", {}, True),
        ("$A", {}, False),
        ("$A", {"add_bos_token": True}, False),  # transformers 5 does not read it
        ("<|im_start|> $A", {"add_bos_token": False}, True),
        ("<|endoftext|> <|im_start|> $A", {}, False),  # not the token of documents alone
        (None, {}, False),
    ],
)
def test_a_text_begins_as_with_transformers(single, settings, documents, folder, byte_level):
    transformers = pytest.importorskip("transformers")
    made = tokenizers.Tokenizer.from_str(byte_level)
    level = tokenizers.processors.ByteLevel(trim_offsets=False)
    special = [(name, number) for number, name in enumerate(SPECIAL)]
    made.post_processor = level
    if single is not None:
        template = tokenizers.processors.TemplateProcessing(single=single, special_tokens=special)
        made.post_processor = tokenizers.processors.Sequence([level, template])
    made.no_truncation()
    made.no_padding()
    (folder / "tokenizer.json").write_text(made.to_str())
    bos = {"__type": "AddedToken", "content": "<|im_start|>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": "<|endoftext|>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(str(shutil.copytree(folder, folder / "copy")))
    plain, begun = theirs("a b", add_special_tokens=False)["input_ids"], theirs("a b")["input_ids"]
    before = ids_before_text(folder)
    assert begun[: len(before) + len(plain)] == before + plain
    assert adds_bos(folder) == documents == (before == [1])


@pytest.mark.parametrize("kind", ["RobertaProcessing", "BertProcessing"])
def test_a_text_begins_with_the_token_of_classes_where_the_library_puts_it(kind, folder, byte_level):
    made = tokenizers.Tokenizer.from_str(byte_level)
    made.post_processor = getattr(tokenizers.processors, kind)(("<|im_end|>", 2), ("<|im_start|>", 1))
    (folder / "tokenizer.json").write_text(made.to_str())
    made.no_truncation()
    made.no_padding()
    assert ids_before_text(folder) == [1] == made.encode("a b").ids[:1]


@pytest.mark.parametrize("settings", [None, {}, {"add_bos_token": False}, {"add_bos_token": True}])
def test_a_folder_with_tokenizer_model_alone_says_by_a_field_how_texts_begin(settings, tmp_path):
    (tmp_path / "tokenizer.model").touch()
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert adds_bos(tmp_path) == bool(settings and settings["add_bos_token"])
    assert ids_before_text(tmp_path) == []
