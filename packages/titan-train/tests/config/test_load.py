import dataclasses
import re
import time
from pathlib import Path

import pytest
from titan_train.config import Config, ConfigError, dump_config, list_configs, load_config, parse_config
from titan_train.config.elsewhere import here_it_is, read_table
from titan_train.config.words import settings_of


def write(tmp_path, text, name="run.toml"):
    file = tmp_path / name
    file.write_text(text)
    return str(file)


def test_the_shipped_configurations_load_and_survive_a_round_trip():
    import tomllib

    assert "quickstart" in list_configs()
    for name in list_configs():
        config = load_config(name)
        assert parse_config(tomllib.loads(dump_config(config))) == config


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path):
    file = write(tmp_path, "[train]\nsteps = 7\nglobal_batch = 4\n")
    config = load_config(file, ["--train.steps", "9", "--run.seed", "3"])
    assert (config.train.steps, config.train.global_batch, config.run.seed) == (9, 4, 3)
    assert config.train.max_grad_norm == Config().train.max_grad_norm


def test_a_run_is_named_for_its_file_unless_it_says_otherwise(tmp_path):
    assert load_config(write(tmp_path, "", "mine.toml")).run.name == "mine"
    assert load_config(write(tmp_path, '[run]\nname = "other"\n', "mine.toml")).run.name == "other"


def test_extends_merges_tables_and_replaces_values(tmp_path):
    write(tmp_path, "[train]\nsteps = 5\nglobal_batch = 4\n", "base.toml")
    config = load_config(write(tmp_path, 'extends = "base.toml"\n[train]\nsteps = 6\n'))
    assert (config.train.steps, config.train.global_batch) == (6, 4)


def test_extends_finds_a_shipped_configuration(tmp_path):
    config = load_config(write(tmp_path, 'extends = "quickstart"\n[train]\nsteps = 6\n'))
    assert config.train.steps == 6
    assert config.model == load_config("quickstart").model


def test_a_circle_of_extends_is_an_error(tmp_path):
    write(tmp_path, 'extends = "b.toml"\n', "a.toml")
    with pytest.raises(ConfigError, match=r"circle: b.toml -> a.toml -> b.toml"):
        load_config(write(tmp_path, 'extends = "a.toml"\n', "b.toml"))


MALFORMED = {
    "unknown section": ("[trian]\nsteps = 1\n", ["trian", "did you mean train?"]),
    "unknown key": ("[train]\nstep = 1\n", ["train.step", "did you mean train.steps?"]),
    "a key of another trainer": ("learning_rate = 3e-4\n", ["learning_rate", "here it is optimizer.lr."]),
    "a key of another trainer that is a section here": (
        'compile = true\noptimizer = "adamw"\n',
        ["not a boolean; here it is compile.enabled.", "not a string; here it is optimizer.name."],
    ),
    "a section of another trainer": (
        "[training]\nlocal_batch_size = 4\nsteps = 9\n",
        ["training.local_batch_size", "here it is train.microbatch", "training.steps", "here it is train.steps."],
    ),
    "unknown key in a list": (
        '[[data.sources]]\nnam = "a"\n',
        ["data.sources.0.nam", "did you mean data.sources.0.name?"],
    ),
    "a key of a list's entries": (
        '[data]\npacking = "cut"\n',
        ["data.packing", "it is of each entry: data.sources.0.packing."],
    ),
    "quoted integer": ('[train]\nsteps = "10"\n', ["train.steps", '"10"', "without quotes"]),
    "fraction for an integer": ("[train]\nsteps = 10.6\n", ["train.steps", "10.6", "the nearest is 11"]),
    "integer for a boolean": ("[compile]\nenabled = 1\n", ["compile.enabled", "1", "true or false"]),
    "misspelt choice": ('[parallel]\nmode = "fdsp"\n', ["parallel.mode", '"fdsp"', 'did you mean "fsdp"?']),
    "unlike any choice": ('[train]\ndtype = "int8"\n', ["train.dtype", '"int8"', "fp32"]),
    "string for a list": ('[parallel]\nkeep_fp32 = "norm"\n', ["parallel.keep_fp32", '"norm"', "a list"]),
    "zero steps": ("[train]\nsteps = 0\n", ["train.steps", "0", "nearest valid choice is 1"]),
    "negative seed": ("[run]\nseed = -1\n", ["run.seed", "-1", "use 0"]),
    "a path as a name": ('[run]\nname = "a/b"\n', ["run.name", "a/b", "plain folder name"]),
    "two degrees left over": (
        "[parallel]\ndp_replicate = -1\n",
        ["parallel.dp_replicate", "parallel.dp_shard", "Set one to 1"],
    ),
    "zero degree": ("[parallel]\ndp_shard = 0\n", ["parallel.dp_shard", "0", "-1 takes the remaining ranks"]),
    "micro-batch that does not divide": (
        "[train]\nglobal_batch = 12\nmicrobatch = 5\n",
        ["train.microbatch", "5", "is 4"],
    ),
    "negative clip": ("[train]\nmax_grad_norm = -1.0\n", ["train.max_grad_norm", "-1.0", "0 measures"]),
    "negative interval": ("[checkpoint]\nevery = -5\n", ["checkpoint.every=-5 must be at least 0; 0 disables"]),
    "a hook in the wrong mode": (
        '[parallel]\nmode = "fsdp"\ncompress = "powersgd"\n',
        ["parallel.compress", "powersgd", "'bf16'"],
    ),
    "zero reshard": (
        "[parallel]\nreshard = 0\n",
        ["parallel.reshard=0 must be at least 1", "'default', 'always', 'never'"],
    ),
    "no such reshard": ('[parallel]\nreshard = "alway"\n', ["parallel.reshard", "alway", "always"]),
    "a number for a table": ("train = 5\n", ["train", "5", "a table"]),
    "not TOML": ("[train\n", ["not TOML", "line 1"]),
    "a date": ("[train]\nsteps = 2026-01-01\n", ["date", "strings, numbers, booleans"]),
    "extends is not a string": ("extends = 3\n", ["extends = 3", "must be a string"]),
    "unknown source kind": (
        '[[data.sources]]\nname = "a"\nkind = "json"\npaths = ["x"]\n',
        ["kind", '"json"', "jsonl"],
    ),
    "unknown model": ('[model]\nname = "llama3_9b"\n', ["model.name", "llama3_9b", "llama3_8b"]),
}


@pytest.mark.parametrize("case", MALFORMED, ids=str)
def test_a_malformed_configuration_names_key_value_and_the_way_out(case, tmp_path):
    text, expected = MALFORMED[case]
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    for part in expected:
        assert part in str(caught.value), str(caught.value)


def test_every_problem_is_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, '[train]\nsteps = "a"\ndtype = "fp8"\n[parallel]\nmode = "x"\n'))
    assert len(caught.value.problems) == 3


def test_a_missing_file_names_the_nearest_configuration():
    with pytest.raises(ConfigError, match="did you mean 'quickstart'"):
        load_config("quikstart")


def test_a_bad_word_on_the_command_line_names_the_nearest():
    for word, nearest in {
        "--train.stepz": "--train.steps",
        "--steps": "--train.steps",
        "--stepz": "--train.steps",
        "--trian.steps": "--train.steps",
        "--launch.ray.waits": "--launch.ray.wait-s",
        "--no-metrics.raport": "--metrics.report",
    }.items():
        with pytest.raises(ConfigError, match=f"{word}: unknown option; did you mean {nearest}"):
            load_config("quickstart", [word, "3"])


def test_an_option_of_another_trainer_names_ours():
    for word, ours in {
        "--learning-rate": "--optimizer.lr",
        "--parallelism.tensor_parallel_degree": "--parallel.tp",
    }.items():
        with pytest.raises(ConfigError, match=rf"{word}: unknown option; here it is {ours}\."):
            load_config("quickstart", [word, "3"])


def test_an_option_of_a_lists_entries_names_the_first():
    with pytest.raises(
        ConfigError, match=r"--data.max-epochs: unknown option; .* entry: --data.sources.0.max-epochs\."
    ):
        load_config("quickstart", ["--data.max-epochs", "3"])


def test_every_setting_of_the_table_of_other_trainers_exists():
    trainers, rows = read_table()
    ours = {".".join(keys) for keys, _, _ in settings_of(Config)} | {"data.sources.0.max_epochs"}
    assert [row.setting for row in rows if row.setting not in ours or len(row.names) != len(trainers)] == []
    for key in ("gradient_accumulation_steps", "base_model", "training.seq_len", "--micro-batch-size", "n_layer"):
        assert here_it_is(key)
    assert here_it_is("train.steps") == here_it_is("parallel.mode") == ""


# How a value is written on the command line and in TOML, and what it is.
VALUES = [
    ("train.steps", "20", "20", 20),
    ("train.steps", "1_000", "1_000", 1000),
    ("optimizer.lr", "1e-3", "1e-3", 0.001),
    ("optimizer.lr", "1", "1", 1.0),
    ("metrics.report", "false", "false", False),
    ("metrics.report", "True", "true", True),
    ("optimizer.name", "sgd", '"sgd"', "sgd"),
    ("run.name", "3", '"3"', "3"),
    ("run.dir", "a dir/x", '"a dir/x"', "a dir/x"),
    ("pipeline.cuts", "[2, 4]", "[2, 4]", (2, 4)),
    ("pipeline.cuts", "[]", "[]", ()),
    ("parallel.keep_fp32", "*norm*", '["*norm*"]', ("*norm*",)),
    ("parallel.reshard", "4", "4", 4),
    ("parallel.reshard", "never", '"never"', "never"),
    ("launch.ray.wait_s", "5", "5", 5.0),
]


@pytest.mark.parametrize(("key", "word", "toml", "value"), VALUES, ids=lambda value: str(value))
def test_the_command_line_and_toml_read_the_same_values(key, word, toml, value, tmp_path):
    section, _, name = key.rpartition(".")
    from_file = load_config(write(tmp_path, f"[{section}]\n{name} = {toml}\n"))
    for option in ([f"--{key}", word], [f"--{key.replace('_', '-')}={word}"]):
        config = load_config(write(tmp_path, ""), option)
        assert config == from_file
    for part in key.split("."):
        config = getattr(config, part)
    assert config == value


WRONG = [
    ("metrics.report", "yes", '"yes"'),
    ("metrics.report", "1", "1"),
    ("train.steps", "1.5", "1.5"),
    ("train.steps", "1e26", "1e26"),
    ("train.steps", "99999999999999999999999999", "99999999999999999999999999"),
    ("train.steps", "many", '"many"'),
    ("train.steps", "", '""'),
    ("train.steps", "-1", "-1"),
    ("optimizer.lr", "fast", '"fast"'),
    ("optimizer.lr", "nan", "nan"),
    ("optimizer.lr", "-inf", "-inf"),
    ("optimizer.name", "adam", '"adam"'),
    ("optimizer.name", "3", '"3"'),
    ("pipeline.cuts", "[2, 'x']", "[2, 'x']"),
    ("pipeline.cuts", "[4, 2]", "[4, 2]"),
    ("parallel.reshard", "sometimes", '"sometimes"'),
    ("parallel.reshard", "0", "0"),
    ("run.name", "a/b", '"a/b"'),
    ("model.name", "llama3_9b", '"llama3_9b"'),
    ("data.sources", "[{name = 'a', kind = 'json', paths = ['x']}]", "[{name = 'a', kind = 'json', paths = ['x']}]"),
]


@pytest.mark.parametrize(("key", "word", "toml"), WRONG, ids=lambda value: str(value))
def test_the_command_line_and_toml_refuse_in_the_same_words(key, word, toml, tmp_path):
    section, _, name = key.rpartition(".")
    with pytest.raises(ConfigError) as from_file:
        load_config(write(tmp_path, f"[{section}]\n{name} = {toml}\n"))
    with pytest.raises(ConfigError) as typed:
        load_config(write(tmp_path, ""), [f"--{key}", word])
    problems = [problem.replace(f"--{key}", key) for problem in typed.value.problems]
    assert problems == from_file.value.problems


def test_what_only_a_command_line_can_write(tmp_path):
    file = write(tmp_path, "[model]\nargs = {dim = 64}\n[[data.sources]]\nname = 'a'\nkind = 'stdlib'\n")
    config = load_config(
        file,
        [
            "--metrics.no-report",
            "--launch.elastic",
            "--no-parallel.sequence-parallel",
            "--model.args.num-heads",
            "3",
            "--data.sources.0.weight",
            "2",
            "--pipeline.cuts",
            "2",
            "4",
            "--parallel.tp-plan.blocks.*.q",
            "colwise",
            "--parallel",
            "pp2",
            "dp4",
        ],
    )
    assert not config.metrics.report
    assert config.launch.elastic
    assert not config.parallel.sequence_parallel
    assert config.model.args == {"dim": 64, "num_heads": 3}
    assert config.data.sources[0].weight == 2.0
    assert config.pipeline.cuts == (2, 4)
    assert config.parallel.tp_plan == {"blocks.*.q": "colwise"}
    assert (config.parallel.pp, config.parallel.dp_shard) == (2, 4)
    assert load_config(file, ["--model.args", "{num_heads = 3}"]).model.args == {"dim": 64, "num_heads": 3}
    lists = load_config(file, ["--model.args.layers", "[0, 2]"]).model.args
    assert lists == load_config(file, ["--model.args", "{layers = [0, 2]}"]).model.args == {"dim": 64, "layers": (0, 2)}
    assert load_config(file, ["--model.args", "num_heads", "3"]).model.args == {"dim": 64, "num_heads": 3}


def test_a_problem_of_the_command_line_is_spelled_as_it_was_typed(tmp_path):
    with pytest.raises(ConfigError, match=r"command line: 1 problem\n  --train.global-batch=0 must be at least 1"):
        load_config(write(tmp_path, ""), ["--train.global-batch", "0"])
    with pytest.raises(ConfigError, match=r"run.toml: 1 problem\n  train.global_batch=0 must be at least 1"):
        load_config(write(tmp_path, "[train]\nglobal_batch = 0\n"), ["--train.steps", "3"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--train.steps"], "--train.steps needs a value"),
        (["--train.steps", "3", "4"], "'4' is left over"),
        (["train.steps=3"], "unexpected 'train.steps=3'"),
        (["--no-metrics.report", "true"], "takes no value"),
        (["--pipeline.cuts", "[1,"], "not a TOML value"),
        (["--train", "3"], "--train is a section"),
        (["--model.args", "dim"], "--model.args is a table"),
        (["--model.args.layers", "0", "2"], "A list is one value: --model.args.layers '[1, 2]'"),
        (["--data.sources", "a"], "list of tables"),
        (["--data.sources.5.name", "a"], "the list has 1 entries"),
        (["--parallel", "zz9"], "--parallel 'zz9'"),
        (["--run.name", "a\0b"], "NUL"),
        (["--run.name", "a\udcffb"], "UTF-8"),
        (["--train.steps", "9" * 5000], "finite"),
        (["--model.args", "{a = " + "9" * 5000 + "}"], "not a TOML value"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_words_that_are_no_settings_are_refused(words, expected, tmp_path):
    with pytest.raises(ConfigError, match="command line") as caught:
        load_config(write(tmp_path, ""), words)
    assert expected in str(caught.value)


def test_help_lists_every_setting_in_under_a_second(capsys):
    from titan_train.config.help import settings_help
    from titan_train.config.words import option_names

    started = time.process_time()
    page = settings_help(load_config("quickstart"))
    assert time.process_time() - started < 1
    missing = [option for option in option_names(Config) if f"  {option} " not in page]
    assert missing == []


def test_every_setting_has_a_help_text():
    import inspect

    from titan_train.config import schema

    for section in dataclasses.fields(Config):
        cls = section.default_factory().__class__
        source = inspect.getsource(cls)
        for setting in dataclasses.fields(cls):
            at = source.index(f"    {setting.name}:")
            after = source[at:].split("\n", 1)[1]
            # skip the lines of a long default
            assert '"""' in after[: after.find("\n\n") if "\n\n" in after else None], f"{cls.__name__}.{setting.name}"
    assert schema.Config is Config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compile.backend", ""], "is not the name of a backend"),
        (["--compile.backend", "os:system"], "is not the name of a backend"),
        (["--compile.backend", "eager", "--compile.mode", "max-autotune-no-cudagraphs"], "is a mode of inductor"),
        (["--compile.mode", "reduce-overhead"], r'overwrite.*compile.cudagraphs=true.*compile.mode = "default"'),
        (["--compile.mode", "max-autotune"], r'compile.cudagraphs=true.*"max-autotune-no-cudagraphs"'),
    ],
)
def test_a_backend_of_torch_compile_is_a_name_and_only_inductor_has_modes(words, message):
    with pytest.raises(ValueError, match=message):
        load_config("debug", words)


def test_a_backend_that_torch_does_not_know_is_refused_with_the_nearest():
    from titan_train.parallel.compiled import check_backend

    with pytest.raises(
        ValueError, match=r"compile.backend='aot_eagre': torch.compile has no such backend.*'aot_eager'"
    ):
        check_backend("aot_eagre")
    for backend in ("inductor", "eager", "aot_eager"):
        check_backend(backend)


def test_keywords_of_a_program_set_sections_and_single_settings():
    given = load_config(
        "debug", ["--train.steps", "5"], train={"steps": 8}, **{"data.sources.0.weight": 2.0, "run.dir": Path("a")}
    )
    typed = load_config("debug", ["--train.steps", "8", "--data.sources.0.weight", "2.0", "--run.dir", "a"])
    assert given == typed


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"trian": {"steps": 3}}, "trian: unknown setting. Did you mean 'train'"),
        ({"train.stepz": 3}, "Did you mean 'train.steps'"),
        ({"train": {"step": 8}}, "train.step: unknown key; did you mean train.steps"),
        ({"train": {"steps": "8"}}, "must be an integer"),
        ({"train": 8}, "train = 8: must be a table"),
    ],
)
def test_a_keyword_that_cannot_work_names_the_setting(settings, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config("debug", **settings)


def test_patterns_of_the_command_line_come_before_those_of_the_file_and_of_what_it_extends(tmp_path):
    base = write(tmp_path, '[optimizer.lr_scales]\n"norm" = 0.1\n"wq" = 0.5\n', "base.toml")
    child = write(
        tmp_path, 'extends = "base.toml"\n[optimizer.lr_scales]\n"wq" = 0.25\n"ffn_norm" = 1.0\n', "child.toml"
    )

    def order(file, *words):
        return list(load_config(file, words).optimizer.lr_scales.items())

    assert order(child) == [("wq", 0.25), ("ffn_norm", 1.0), ("norm", 0.1)]
    key = "--optimizer.lr-scales"
    assert order(base, f"{key}.ffn_norm", "1") == [("ffn_norm", 1.0), ("norm", 0.1), ("wq", 0.5)]
    assert order(base, f"{key}.wq", "1") == [("wq", 1.0), ("norm", 0.1)]
    assert order(base, f"{key}.wk", "2", f"{key}.w", "3") == [("w", 3.0), ("wk", 2.0), ("norm", 0.1), ("wq", 0.5)]
    for words in ([key, "{final = 2.0, wq = 0.25}"], [key, "final", "2", "wq", "0.25"]):
        assert order(base, *words) == [("final", 2.0), ("wq", 0.25), ("norm", 0.1)]
