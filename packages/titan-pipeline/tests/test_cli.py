"""The command line does what its help says."""

import json
import os
from pathlib import Path

import pytest
from titan_pipeline import Costs, Schedule, verify
from titan_pipeline.cli import main


@pytest.mark.parametrize("ending", ["json", "txt", "csv"])
def test_a_generated_file_verifies_simulates_draws_and_traces(tmp_path, capsys, ending):
    file = tmp_path / f"s.{ending}"
    assert main(["gen", "zbv", "-p", "2", "-m", "4", "-o", str(file)]) == 0
    assert main(["verify", str(file), "--mem-limit", "2"]) == 0
    assert "peak memory per rank: 2 2" in capsys.readouterr().out
    assert main(["sim", str(file), "--json", "--latency", "0.1"]) == 0
    assert json.loads(capsys.readouterr().out)["idle_communication"] > 0
    for name in ("s.svg", "s.html"):
        assert main(["draw", str(file), "-o", str(tmp_path / name)]) == 0
        assert "<svg" in (tmp_path / name).read_text()
    assert main(["trace", str(file), "-o", str(tmp_path / "t.json")]) == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C", "s", "f"}


def test_a_browser_shows_what_is_drawn_without_a_complaint(tmp_path, browser):
    file = tmp_path / "s.json"
    main(["gen", "zbv", "-p", "2", "-m", "4", "-o", str(file)])
    for name in ("s.svg", "s.html"):
        main(["draw", str(file), "-o", str(tmp_path / name)])
        page = browser.open((tmp_path / name).as_uri())
        assert page.ask("document.querySelectorAll('rect').length") > 48  # forward, backward, weights of 2 x 2 x 4
        assert "zbv" in page.ask("document.documentElement.textContent")
        assert page.ask("document.documentElement.scrollWidth <= innerWidth")
        assert page.errors == []
        page.close()


def test_drawings_are_stable_text(tmp_path):
    main(["gen", "1f1b", "-p", "2", "-m", "3", "-o", str(tmp_path / "a.json")])
    for name in ("1.svg", "2.svg"):
        main(["draw", str(tmp_path / "a.json"), "-o", str(tmp_path / name)])
    assert (tmp_path / "1.svg").read_text() == (tmp_path / "2.svg").read_text()


def test_gen_writes_communication_to_standard_output(capsys):
    assert main(["gen", "1f1b", "-p", "2", "-m", "2", "--communication"]) == 0
    schedule = Schedule.from_text(capsys.readouterr().out)
    assert schedule.communicates
    verify(schedule)


def test_a_csv_is_refused_where_sends_and_receives_are_asked_for(tmp_path, capsys):
    assert main(["gen", "1f1b", "-p", "2", "-m", "2", "--communication", "-o", str(tmp_path / "s.csv")]) == 2
    assert "torch's CSV holds compute actions alone" in capsys.readouterr().err
    assert not (tmp_path / "s.csv").exists()


def test_solve_writes_a_schedule_that_fits(tmp_path, capsys):
    (tmp_path / "costs.json").write_text(Costs.uniform(4, num_chunks=2).to_json())
    call = ["solve", "--costs", str(tmp_path / "costs.json"), "-m", "4", "--placement", "v", "--mem-limit", "2"]
    assert main([*call, "--time-limit", "0.2", "-o", str(tmp_path / "s.json")]) == 0
    assert "gap" in capsys.readouterr().out
    verify(Schedule.load(tmp_path / "s.json"), mem_limit=2)


def test_exit_codes_tell_a_faulty_schedule_from_a_faulty_request(tmp_path, capsys):
    file = tmp_path / "s.json"
    main(["gen", "gpipe", "-p", "2", "-m", "4", "-o", str(file)])
    assert main(["verify", str(file), "--mem-limit", "3"]) == 1
    assert "[memory]" in capsys.readouterr().err
    assert main(["gen", "dualpipe_v", "-p", "2", "-m", "3"]) == 2
    assert "num_microbatches >= 4" in capsys.readouterr().err
    assert main(["draw", str(file), "-o", str(tmp_path / "a.png")]) == 2
    assert main(["verify", str(tmp_path / "none.json")]) == 2


def test_what_a_reader_would_wait_for_is_refused(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    main(["gen", "gpipe", "-p", "2", "-m", "4", "-o", str(tmp_path / "s.json")])
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        assert main(["verify", str(path)]) == 2
        assert main(["sim", str(tmp_path / "s.json"), "--costs", str(path)]) == 2
        assert capsys.readouterr().err.count("is a folder, a pipe or a device") == 2


@pytest.mark.parametrize("change", [{"forward": 1.0}, {"link": 0.1}, {"links": []}, {"links": {"0->1": 0.1}}])
def test_costs_of_another_type_are_a_faulty_request(tmp_path, capsys, change):
    main(["gen", "1f1b", "-p", "2", "-m", "2", "-o", str(tmp_path / "s.txt")])
    (tmp_path / "c.json").write_text(json.dumps(json.loads(Costs.uniform(2).to_json()) | change))
    assert main(["sim", str(tmp_path / "s.txt"), "--costs", str(tmp_path / "c.json")]) == 2
    assert "error: costs file" in capsys.readouterr().err


@pytest.mark.parametrize("mark", [99, 0])
def test_a_wrong_overlap_mark_is_refused_by_verify_alone(tmp_path, capsys, mark):
    file = tmp_path / "s.txt"
    main(["gen", "1f1b", "-p", "2", "-m", "2", "--communication", "-o", str(file)])
    file.write_text(f"{file.read_text()}overlap 1: {mark}\n")
    assert main(["verify", str(file)]) == 1
    assert "an overlap mark needs" in capsys.readouterr().err
    assert main(["sim", str(file)]) == 0
    assert main(["draw", str(file), "-o", str(tmp_path / "s.svg")]) == 0
    assert main(["trace", str(file), "-o", str(tmp_path / "t.json")]) == 0
