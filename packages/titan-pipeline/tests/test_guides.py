"""The steps of the guide "add a schedule" work as written, from outside the package."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[3] / "docs/guides/add_a_schedule.md"


@pytest.fixture
def folder(tmp_path):
    """The files the guide has its reader write, and what installing the package leaves behind."""
    text = GUIDE.read_text()
    family, use = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    (tmp_path / "eager_schedule.py").write_text(family)
    (tmp_path / "use.py").write_text(use)
    (entry_points,) = re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S)
    info = tmp_path / "eager_schedule-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: eager-schedule\nVersion: 1.0\n")
    table = entry_points.replace('[project.entry-points."', "[").replace('"]', "]").replace('"', "")
    (info / "entry_points.txt").write_text(table)
    return tmp_path


def run(folder, *command):
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_family_of_ones_own_is_proven_and_simulated(folder):
    printed = run(folder, "use.py")
    for number in ("peak 4, bubble 32.4%", "peak 7, bubble 20.0%"):
        assert number in printed, printed
        assert all(part.replace("%", " %") in GUIDE.read_text() for part in re.findall(r"[\d.]+%", number))


def test_the_command_line_finds_it_by_its_entry_point(folder):
    (commands,) = re.findall(r"^```sh\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    for line in commands.splitlines():
        program, *arguments = line.split()
        assert program == "titan-pipeline"
        run(folder, "-c", f"from titan_pipeline.cli import main; raise SystemExit(main({arguments}))")
    assert "eager_1f1b" in (folder / "eager.svg").read_text()


def test_titan_train_lists_it(folder):
    pytest.importorskip("titan_train")
    printed = run(folder, "-c", "from titan_train.cli import main; raise SystemExit(main(['list']))")
    assert "eager_1f1b" in printed


def test_a_name_cannot_be_taken_twice():
    from titan_pipeline import register_family
    from titan_pipeline.families import gpipe

    with pytest.raises(ValueError, match="registered already"):
        register_family("gpipe", gpipe)
    with pytest.raises(ValueError, match="fewest and the most stages"):
        register_family("new", gpipe, chunks=(0, 1))


def test_a_family_with_a_choice_of_chunks_is_given_their_number(monkeypatch):
    from titan_pipeline import FAMILIES, ScheduleFamily, build_schedule
    from titan_pipeline.families import interleaved_1f1b

    monkeypatch.setitem(FAMILIES, "few", ScheduleFamily(interleaved_1f1b, (1, 4), False, ""))
    assert build_schedule("few", 2, 4, num_chunks=3).num_chunks == 3
    assert build_schedule("few", 2, 4).num_chunks == 1
    for_costs = ScheduleFamily(
        lambda p, m, chunks, costs, limit: interleaved_1f1b(p, m, chunks), (1, 4), False, "", True
    )
    monkeypatch.setitem(FAMILIES, "few_for_costs", for_costs)
    assert build_schedule("few_for_costs", 2, 4, num_chunks=3).num_chunks == 3
    with pytest.raises(ValueError, match="few has 1 to 4 stage"):
        build_schedule("few", 2, 4, num_chunks=5)


@pytest.mark.parametrize(("name", "idle"), [("1f1b", "27 %"), ("zb_h1", "11 %"), ("zbv", "6 %")])
def test_the_pictures_of_the_concept_page_are_what_the_package_draws(name, idle):
    from titan_pipeline import Costs, build_schedule, draw_svg, simulate

    page = GUIDE.parents[1] / "concepts/pipeline.md"
    schedule = build_schedule(name, 4, 8)
    result = simulate(schedule, Costs.uniform(schedule.num_stages, num_chunks=schedule.num_chunks))
    assert (page.parent / f"pictures/pipeline_{name}.svg").read_text() == draw_svg(result, width=900)
    assert f"{result.makespan_bubble:.0%}".replace("%", " %") == idle
    assert idle in page.read_text()
