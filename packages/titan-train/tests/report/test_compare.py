import re

import pytest
from titan_train.cli import main
from titan_train.report import compare_runs


def test_the_page_holds_every_run_and_the_settings_that_differ(make_run, tmp_path):
    runs = [make_run(steps, name=name) for steps, name in ((40, "small"), (30, "large"), (20, "<odd> & name"))]
    for run, rate in zip(runs, (0.001, 0.002, 0.001), strict=True):
        config = run / "config.toml"
        config.write_text(config.read_text() + f"[optimizer]\nlr = {rate}\nname = 'adamw'\n")
    text = compare_runs(runs, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "&lt;odd&gt; &amp; name" in page
    assert "<odd>" not in page
    assert page.count('class="line run2"') >= 5
    differing = page[page.index("Settings that differ") : page.index("Numbers")]
    assert re.findall(r"<td>([^<]*)</td>", differing) == ["optimizer.lr", "0.001", "0.002", "0.001"]
    assert re.search(r"^optimizer.lr +0.001 +0.002 +0.001$", text, re.MULTILINE)
    assert re.search(r"^Steps +40 +30 +20$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("tasks", "unit"),
    [
        (("text", "text"), "nats per token"),
        (("diffusion", "diffusion"), "mean per element"),
        (("text", "diffusion"), "nats per token, mean per element"),
    ],
)
def test_losses_have_the_unit_of_their_task(make_run, tmp_path, tasks, unit):
    runs = [make_run(20, name=f"run{i}") for i in range(2)]
    for run, task in zip(runs, tasks, strict=True):
        config = run / "config.toml"
        config.write_text(config.read_text() + f"[model]\ntask = '{task}'\n")
    compare_runs(runs, tmp_path / "page.html")
    shown = re.findall(r"<h2>\w+ loss <small>([^<]*)</small>", (tmp_path / "page.html").read_text())
    assert shown == [unit, unit]


def test_runs_of_one_name_are_told_apart_by_their_folders(make_run, tmp_path):
    first = make_run(10)
    (tmp_path / "other").mkdir()
    second = first.rename(tmp_path / "other" / "quickstart")
    first = make_run(10)
    text = compare_runs([first, second], tmp_path / "page.html")
    assert f"{tmp_path.name}/quickstart" in text.splitlines()[0]
    assert "other/quickstart" in text.splitlines()[0]
    assert "settings" in text.splitlines()[-1]


def test_runs_without_steps_or_configuration_do_not_stop_it(make_run, tmp_path):
    broken = make_run(0, name="broken", status=None)
    (broken / "config.toml").write_text("not toml [")
    assert "killed" in compare_runs([broken, make_run(10)], tmp_path / "page.html")


@pytest.mark.parametrize("count", [9])
def test_too_many_runs_are_refused(make_run, tmp_path, capsys, count):
    runs = [str(make_run(1, name=f"run{i}")) for i in range(count)]
    assert main(["report", *runs, "--out", str(tmp_path / "page.html")]) == 2
    assert f"{count} runs were given; compare takes 2 to 8" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_a_run_given_twice_or_a_folder_without_a_run_is_refused(make_run, tmp_path, capsys):
    run = str(make_run(1))
    assert main(["report", run, run, "--out", str(tmp_path / "page.html")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["report", run, str(tmp_path / "empty"), "--out", str(tmp_path / "page.html")]) == 2
    assert "give the folder of a run" in capsys.readouterr().err
