import json

import pytest
from pydantic import TypeAdapter
from titan_train.config import DataConfig, SourceConfig, TokenizerConfig
from titan_train.config.tokenizer import PATTERN_NAMES
from titan_train.tokenizers.tiktoken import PATTERNS


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (SourceConfig, {"name": "a b", "paths": ("x",)}, r"data.sources.name='a b' .* example 'a-b'"),
        (SourceConfig, {"name": "a", "kind": "json", "paths": ("x",)}, r"kind='json' is not .* mean 'jsonl'\?"),
        (SourceConfig, {"name": "a", "kind": "jsonl"}, r"data.sources\['a'\].paths is empty.*stdlib"),
        (SourceConfig, {"name": "a", "paths": ("",)}, "holds an empty path"),
        (SourceConfig, {"name": "a", "paths": ("x",), "weight": 0.0}, "weight=0.0 must be above 0; remove a source"),
        (SourceConfig, {"name": "a", "paths": ("x",), "weight": float("nan")}, "weight=nan"),
        (SourceConfig, {"name": "a", "paths": ("x",), "text_key": ""}, 'The usual one is "text"'),
        (SourceConfig, {"name": "a", "paths": ("x",), "max_epochs": -1}, "max_epochs=-1 must be at least 0; 0 repeats"),
        (TokenizerConfig, {"kind": "sentencepeice"}, r"tokenizer.kind='sentencepeice' .* mean 'sentencepiece'\?"),
        (TokenizerConfig, {"kind": "tiktoken"}, r'tokenizer.path="" with kind="tiktoken"'),
        (TokenizerConfig, {"train": False}, "train=false: there is no model to load"),
        (TokenizerConfig, {"kind": "bytes", "path": "x"}, "bytes load nothing"),
        (TokenizerConfig, {"vocab_size": 100}, "vocab_size=100 leaves no room .* Use 300 or more"),
        (TokenizerConfig, {"kind": "tiktoken", "path": "x", "pattern": "lama3"}, r"'lama3' .* mean 'llama3'\?"),
        (DataConfig, {"sources": ()}, "data.sources is empty"),
        (
            DataConfig,
            {"sources": (SourceConfig(name="a", kind="stdlib"), SourceConfig(name="a", kind="stdlib"))},
            r"hold the name 'a' twice.*'a-2'",
        ),
        (DataConfig, {"validation_fraction": 1.0}, "validation_fraction=1.0 must be at least 0 and below 1; "),
        (DataConfig, {"on_error": "ignore"}, "data.on_error='ignore' is not one of 'raise', 'skip', 'quarantine'"),
        (DataConfig, {"verify": "ful"}, r"mean 'full'\?"),
        (DataConfig, {"max_bad_fraction": 2.0}, r"max_bad_fraction=2.0 .* nearest valid choice is 1"),
        (DataConfig, {"prefetch": -1}, "data.prefetch=-1 must be at least 0; 0 prepares"),
        (DataConfig, {"shard_tokens": 0}, "data.shard_tokens=0 must be at least 1"),
    ],
)
def test_invalid_values_are_refused_naming_key_value_and_the_nearest_valid_choice(cls, values, message):
    with pytest.raises(ValueError, match=message):
        cls(**values)


def test_defaults_are_valid_and_survive_strict_json():
    text = json.dumps(
        {
            "sources": [{"name": "web", "kind": "jsonl", "paths": ["a.jsonl.zst", "b/*.jsonl"], "weight": 0.7}],
            "validation_fraction": 0.05,
        }
    )
    config = TypeAdapter(DataConfig).validate_json(text, strict=True)
    assert config.sources[0].paths == ("a.jsonl.zst", "b/*.jsonl")
    assert TypeAdapter(TokenizerConfig).validate_json("{}", strict=True) == TokenizerConfig()
    assert DataConfig().sources[0].kind == "stdlib"


def test_named_patterns_are_those_the_tokenizer_has():
    assert set(PATTERN_NAMES) == set(PATTERNS)
