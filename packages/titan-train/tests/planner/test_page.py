"""The plan's page shows what Python computed, saved and served, and a browser shows it at desktop and phone width."""

import contextlib
import json
import re
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from titan_testing.browser import Browser
from titan_train.planner import estimate, find_shape, load_machine
from titan_train.planner.search.search import search
from titan_train.planner.search.space import PlanRequest
from titan_train.planner.view.page import Plan, build_plan_app, page


def data_of(html: str) -> dict:
    return json.loads(re.search(r"const DATA = (.*);", html)[1])


@pytest.fixture(scope="module")
def plan() -> Plan:
    request = PlanRequest(
        shape=find_shape("llama3_8b"), machine=load_machine("h100"), gpus=8, seq_len=8192, global_batch=64,
        precisions=("bf16", "tensorwise"),
    )  # fmt: skip
    return Plan(search(request).best[0], request.limit_bytes)


def test_what_cannot_run_is_refused_with_the_reason(plan: Plan) -> None:
    for choices, reason in (
        ({"tp": 3}, "does not divide 8 devices"),
        ({"tp": 3, "gpus": 3}, "tp=3 does not divide the heads of each layer"),
        ({"global_batch": 4}, "4 sequences cannot be cut over 8 data-parallel ranks"),
        ({"pp": 8, "global_batch": 2}, "2 microbatches are fewer than 8 pipeline ranks"),
        ({"ep": 2}, "ep=2 must divide"),
        ({"gpus": 64, "pp": 64, "global_batch": 64}, "64 stages need as many layers; the model has 32"),
    ):
        found = plan.answer(choices)
        assert found["state"] == "invalid"
        assert reason in found["verdict"]


def test_axes_that_a_model_lacks_have_no_slider(plan: Plan) -> None:
    cut = replace(plan, uncut=("tp", "pp"))
    for live in (False, True):
        assert set(plan.values(live=live)) - set(cut.values(live=live)) == {"tp", "pp"}
    assert data_of(page(cut))["first"] == cut.answer(cut.choices)


def test_a_copy_on_each_data_parallel_rank_is_ddp(plan: Plan) -> None:
    assert plan.setup({"dp_replicate": 8}).sharding == "ddp"
    assert plan.setup({"dp_replicate": 4}).sharding == "fsdp"
    assert plan.setup({"dp_replicate": 4, "cp": 2}).sharding == "fsdp"


@contextlib.contextmanager
def served(plan: Plan):
    import uvicorn

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        server = uvicorn.Server(uvicorn.Config(build_plan_app(plan), log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(20)


MOVE = """(async () => {
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const seen = [];
const move = async (id, position) => {
  const e = document.getElementById(id);
  e.value = position;
  e.dispatchEvent(new Event("input"));
  for (let i = 0; i < 100 && (i === 0 || document.body.dataset.state === "asking"); i++) await wait(20);
  const text = (id) => document.getElementById(id).textContent;
  seen.push([document.body.dataset.state, text("speed"), text("verdict")]);
};
MOVES
return JSON.stringify([seen, document.documentElement.scrollWidth - document.documentElement.clientWidth]);
})()"""


@pytest.mark.parametrize("width", [1280, 500])
def test_a_browser_draws_the_saved_page_and_its_sliders_snap(
    browser: Browser, tmp_path: Path, plan: Plan, width: int
) -> None:
    file = tmp_path / "page.html"
    file.write_text(page(plan))
    shown = browser.open(file.as_uri(), width=width)
    assert shown.ask("document.getElementById('speed').textContent") == data_of(page(plan))["first"]["speed"]
    assert "setups that were computed around this plan" in shown.ask("document.getElementById('note').textContent")
    moves = 'await move("recompute", "full"); await move("tp", 1); await move("microbatch", 0);'
    seen, wider = json.loads(shown.ask(MOVE.replace("MOVES", moves)))
    shown.listen(0.5)  # and still there a while later
    assert shown.ask("document.getElementById('speed').textContent") == seen[-1][1]
    assert shown.errors == []
    shown.photograph(tmp_path / "page.png")
    shown.close()
    assert wider == 0  # nothing is wider than the window
    assert seen[0][1] == plan.answer({"recompute": "full"})["speed"]
    assert seen[1][1] == plan.answer({"recompute": "full", "tp": 2})["speed"]


def test_a_served_page_is_answered_by_python(browser: Browser, plan: Plan) -> None:
    pytest.importorskip("starlette")
    with served(plan) as address:
        shown = browser.open(address)
        at = lambda name, value: plan.values(live=True)[name].index(value)  # noqa: E731
        steps = (("gpus", 64), ("pp", 4), ("tp", 256))
        moves = "".join(f"await move('{name}', {at(name, value)});" for name, value in steps)
        seen, _ = json.loads(shown.ask(MOVE.replace("MOVES", moves)))
        assert shown.errors == []
        shown.close()
    assert [state for state, _, _ in seen] == ["fits", "fits", "invalid"]
    assert seen[1][1] == plan.answer({"gpus": 64, "pp": 4})["speed"]
    assert "does not divide 64 devices" in seen[2][2]


def test_the_server_answers_positions_of_its_sliders_and_its_own_page_only(plan: Plan) -> None:
    testclient = pytest.importorskip("starlette.testclient")
    client = testclient.TestClient(build_plan_app(plan), base_url="http://127.0.0.1")
    assert client.post("/answer", json={"tp": 2}).json() == plan.answer({"tp": 2})
    for content in ({"tp": 3.5}, {"model": "hf:/etc"}, [1], "x", {"tp": [2]}):
        assert client.post("/answer", json=content).status_code == 400
    assert client.post("/answer", json={"tp": "2" * 5000}).status_code == 413
    elsewhere = {"origin": "http://elsewhere.example"}
    assert client.post("/answer", json={"tp": 2}, headers=elsewhere).status_code == 403
    assert client.post("/answer", content="{}", headers={"content-type": "text/plain"}).status_code == 415


def test_recomputation_of_each_fourth_block_is_a_position_of_its_own(plan: Plan) -> None:
    """Others mean all blocks, whatever was planned."""
    planned = replace(plan.best.setup, recompute="full", recompute_share=0.25)
    found = estimate(plan.shape, plan.machine, planned, plan.best.constants)
    fourth = Plan(found, plan.limit_bytes)
    assert fourth.choices["recompute"] == "full, each fourth"
    setups = {name: fourth.setup({"recompute": name}) for name in ("none", "full, each fourth", "selective", "full")}
    assert [(s.recompute, s.recompute_share) for s in setups.values()] == [
        ("none", 1.0), ("full", 0.25), ("selective", 1.0), ("full", 1.0)
    ]  # fmt: skip
    assert set(setups) <= set(fourth.values(live=True)["recompute"])
    speeds = [float(fourth.answer({"recompute": name})["speed"].split()[0].replace(",", "")) for name in setups]
    assert speeds == sorted(speeds, reverse=True)


def test_a_layout_whose_heads_cannot_be_exchanged_takes_another_method(plan: Plan) -> None:
    setup = replace(plan.best.setup, cp=4, dp_shard=2, cp_method="ulysses")
    cut = Plan(estimate(plan.shape, plan.machine, setup), plan.limit_bytes)
    assert cut.setup({}).cp_method == "ulysses"
    assert cut.setup({"tp": 4, "cp": 2}).cp_method == "ulysses"
    assert cut.setup({"tp": 2, "cp": 8, "gpus": 16}).cp_method == "allgather"
