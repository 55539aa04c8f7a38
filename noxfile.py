"""Every chore of the project as a documented session: `uvx nox` runs the default ones, `uvx nox -l` lists all."""

import argparse
import json
import shutil
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import nox

nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "types", "tests", "contracts"]

ROOT = Path(__file__).parent
DURATIONS = ROOT / "tests/slow_durations.json"
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
# One thread a rank: several ranks share few cores. And keep bytecode: where it is not kept, importing torch takes 12 s
# of compiling in every process.
TEST_ENV = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
# Two test files at a time: much of a test's time is ranks that wait for each other.
IN_PARALLEL = ["-n", "2", "--dist", "loadfile"]
TEST_TOOLS = [
    requirement
    for requirement in nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), "test")
    if not requirement.startswith("titan-")
]


@nox.session
def lint(session: nox.Session) -> None:
    """Style, import direction between packages, declared dependencies, version ranges between members."""
    _sync(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache")
    for package in PACKAGES:
        with session.chdir(ROOT / "packages" / package):
            session.run("deptry", "src", "--config", "pyproject.toml", silent=True)
    # uv ignores version ranges between workspace members when it locks; this does not.
    session.run("uv", "pip", "check", external=True)


@nox.session
def types(session: nox.Session) -> None:
    """Pyright, strict, on every package's source."""
    _sync(session, "types")
    session.run("pyright", "--pythonpath", str(Path(session.bin) / "python"))


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in [*PACKAGES, "titan-testing"]])
def tests(session: nox.Session, package: str) -> None:
    """One package's tests against its own wheel, in an environment that holds only what it declares."""
    _install_wheels(session, package)
    # a third file: tests of launchers and supervisors wait for seconds with both cores idle
    more = ["-n", "3"] if package == "titan-train" else []
    session.run("pytest", "-q", *IN_PARALLEL, *more, str(_folder(package) / "tests"), *session.posargs, env=TEST_ENV)


@nox.session(default=False)
@nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])
def minimums(session: nox.Session, package: str) -> None:
    """One package's tests on the oldest supported torch, 2.11."""
    _install_wheels(session, package, "torch==2.11.*")
    session.run("pytest", "-q", *IN_PARALLEL, str(_folder(package) / "tests"), *session.posargs, env=TEST_ENV)


_ENDS = {
    "lowest": ("--resolution", "lowest-direct"),
    "newest": ("--exclude-newer", "2999-01-01T00:00:00Z"),  # past the date that pins every other resolution
}


@nox.session(default=False)
@nox.parametrize("end", [nox.param(name, id=name) for name in _ENDS])
@nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])
def ranges(session: nox.Session, package: str, end: str) -> None:
    """One package's tests with the lowest declared version of every dependency, and with the newest there is."""
    _install_wheels(session, package, *_ENDS[end])
    session.run("pytest", "-q", *IN_PARALLEL, str(_folder(package) / "tests"), *session.posargs, env=TEST_ENV)


@nox.session(default=False)
def slow(session: nox.Session) -> None:
    """Slow tests: larger counts of what the default run samples, all of them with `-- --full`.
    `-- --shard 3/8` runs the third of eight equal parts.

    Parts are cut by recorded durations, so `-- --record`, which runs nothing, comes after the last of them.
    """
    parser = argparse.ArgumentParser(prog="nox -s slow --")
    parser.add_argument("--shard", default="1/1", help="which part of how many, by recorded durations")
    parser.add_argument("--full", action="store_true", help="also the tests marked full")
    parser.add_argument(
        "--record", action="store_true", help="write how long tests of the parts took to tests/slow_durations.json"
    )
    arguments, others = parser.parse_known_args(session.posargs)
    reports = ROOT / ".nox/slow_reports"
    if arguments.record:
        for report in reports.glob("*.xml"):
            record_durations(report)
        return
    part, parts = arguments.shard.split("/")
    _sync(session, "test", "--all-packages", "--all-extras")
    # one test at a time to each worker, not one file: a file may hold a quarter of all
    session.run(
        "pytest", "-q", "--slow", "-m", "slow" if arguments.full else "slow and not full", "-n", "2", "--dist", "worksteal",
        "--splits", parts, "--group", part, "--splitting-algorithm", "least_duration", "--durations-path", str(DURATIONS),
        "-o", "junit_family=xunit1", f"--junitxml={reports / f'{part}_of_{parts}.xml'}",
        *(others or ["packages", "testing", "tests"]), env=TEST_ENV, success_codes=[0, 5],
    )  # fmt: skip


def record_durations(report: Path) -> None:
    """Add to tests/slow_durations.json how long each test of a junit report took, failed ones too."""
    known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        module = (file := case.get("file", "")).removesuffix(".py").replace("/", ".")
        classes = case.get("classname", "").removeprefix(module).split(".")
        test = "::".join([file, *filter(None, classes), case.get("name", "")])
        known[test] = round(float(case.get("time", 0)), 1)
    DURATIONS.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n", encoding="utf-8")


@nox.session(default=False, venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Everything that a CUDA device can answer, in eleven minutes, with this Python and offline; see benchmarks/gpu."""
    session.run("python3", "benchmarks/gpu/run.py", "--out", "benchmarks/results/gpu", *session.posargs)


@nox.session(default=False)
def matrix(session: nox.Session) -> None:
    """Every combination of parallelisms against one process; half an hour on two cores."""
    _install_wheels(session, "titan-train")
    tests = "packages/titan-train/tests/parallel/test_matrix.py"
    report = str(Path(session.create_tmp()).absolute() / "matrix.xml")
    junit = ["-o", "junit_family=xunit1", f"--junitxml={report}"]
    session.run("pytest", "-q", "--slow", "-m", "slow", tests, *junit, *session.posargs, env=TEST_ENV)
    session.run("python", "packages/titan-train/benchmarks/matrix_table.py", report, "--out", "benchmarks/results")


_PORTABLE = {
    "mkl-avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "aten-default": {"ATEN_CPU_CAPABILITY": "default"},
    "aten-avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "onednn-avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    # waiting threads yield: several ranks share two cores
    "two-threads": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
}
# Tests whose results are sums: those of kernels, models, layouts and optimizers. What is left out copies bytes, starts
# processes, or prints text, which is the same whichever kernels add.
_SUMS = {
    "titan-cp": [""],
    "titan-fp8": [""],
    "titan-fsdp": [""],
    "titan-ckpt": ["test_resume.py", "test_transformers.py"],
    "titan-pipeline": [
        f"test_{name}.py"
        for name in (
            "data_parallel", "executor", "generic_split", "optimizer", "split", "stage_inputs", "tied", "torch_schedules",
            "weight_grad", "whole_model",
        )
    ],
    "titan-train": [
        "eval", "export/test_targets.py", "fuzz", "generation", "kernels", "models", "optim", "parallel", "tasks", "train",
    ],
}  # fmt: skip


@nox.session(default=False)
@nox.parametrize("kernels", [nox.param(name, id=name) for name in _PORTABLE])
def portability(session: nox.Session, kernels: str) -> None:
    """The default tests of numerics with the kernels of other processors, or with two threads per process."""
    _sync(session, "test", "--all-packages", "--all-extras")
    sums = [str(_folder(package) / "tests" / name) for package, names in _SUMS.items() for name in names]
    # torch.compile finds its C++ again by graph, whichever instructions it was made for
    own = {"TORCHINDUCTOR_CACHE_DIR": str(Path(session.create_tmp()).absolute() / "inductor")}
    session.run("pytest", "-q", *IN_PARALLEL, *(session.posargs or sums), env=TEST_ENV | _PORTABLE[kernels] | own)


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Random compositions against one process, 40 of them; `-- --seed N [--count N]` for others."""
    _install_wheels(session, "titan-train")
    session.install("--quiet", "transformers>=5.18")
    command = "packages/titan-train/tests/fuzz/replay.py"
    session.run("python", command, *(session.posargs or ["--seed", "0", "--count", "40"]), env=TEST_ENV)


@nox.session(default=False)
def families(session: nox.Session) -> None:
    """Every decoder of the installed transformers against transformers itself, and the page with their table; half an hour."""
    _install_wheels(session, "titan-train")
    command = "packages/titan-train/tests/families/table.py"
    rows = str(Path(session.create_tmp()).absolute() / "rows.jsonl")
    Path(rows).unlink(missing_ok=True)
    session.run(
        "python", command, "--rows", rows, "--table", "docs/reference/hf_families.md", *session.posargs, env=TEST_ENV
    )


CARDS = [
    "llama3_8b", "qwen3_8b", "qwen3_30b_a3b", "deepseek_v3", "hf:gemma2", "hf:gpt_oss", "hf:qwen3_next", "hf:olmo3", "hf:mixtral",
    "hf:glm4_moe", "hf:deepseek_v4",
]  # fmt: skip
_PUBLISH = (
    "import sys, json; from transformers import CONFIG_MAPPING as M; "
    "M[sys.argv[1]](**json.loads(sys.argv[2])).save_pretrained(sys.argv[1])"
)
_AS_PUBLISHED = {"glm4_moe": '{"head_dim": 128, "use_qk_norm": true}'}
"""What default configurations of transformers lack of the published models."""


@nox.session(default=False)
def cards(session: nox.Session) -> None:
    """The cards of docs/reference/cards: families proven on this machine, five minutes each; `-- NAME ...` for some of them."""
    _install_wheels(session, "titan-train")
    session.install("--quiet", "transformers>=5.18")
    for name in session.posargs or CARDS:
        folder = ROOT / "docs/reference/cards" / name.removeprefix("hf:")
        with session.chdir(session.create_tmp()):
            if name.startswith("hf:"):  # a family of transformers as its default configuration describes it
                kind = name.removeprefix("hf:")
                session.run("python", "-c", _PUBLISH, kind, _AS_PUBLISHED.get(kind, "{}"))
            shutil.rmtree("card", ignore_errors=True)
            session.run("titan-train", "card", name, "--out", "card", env=TEST_ENV, success_codes=[0, 1])
            folder.mkdir(parents=True, exist_ok=True)
            for file in ("card.md", "card.svg", "card.toml"):
                shutil.copy(Path("card") / file, folder / file)


@nox.session(default=False)
def published(session: nox.Session) -> None:
    """Checkpoints and models against the transformers library: weights in, the same logits out."""
    _sync(session, "test", "--all-packages", "--all-extras")
    session.install("--quiet", "transformers>=5.18")
    tests = ["packages/titan-ckpt/tests", "packages/titan-fsdp/tests", "packages/titan-train/tests/models"]
    session.run("pytest", "-q", "-k", "transformers or published", *tests, *session.posargs, env=TEST_ENV)


@nox.session
def contracts(session: nox.Session) -> None:
    """What the repository promises: README code runs, versions match changelogs, wheels are whole."""
    _sync(session, "test", "--all-packages", "--all-extras")
    # where transformers is installed, which the package itself does not need
    whole_models = "packages/titan-pipeline/tests/test_whole_model.py"
    session.run("pytest", "-q", *IN_PARALLEL, "tests", whole_models, *session.posargs, env=TEST_ENV)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """The documentation; a warning is an error."""
    _sync(session, "docs", "--all-packages", "--all-extras")
    session.run("sphinx-build", "-W", "-b", "html", "docs", "docs/_build")


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Source distribution and wheel of every package, into dist/."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for package in PACKAGES:
        session.run("uv", "build", "--quiet", "--package", package, "--out-dir", str(ROOT / "dist"), external=True)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """A step of the trainer in turns with its peers; see benchmarks/ for the others."""
    _sync(session, "test", "--all-packages")
    session.run("python", "benchmarks/peers/step.py", *session.posargs, env=TEST_ENV)


def _sync(session: nox.Session, group: str, *arguments: str) -> None:
    """Install the workspace (editable) and one dependency group, as the date in pyproject.toml resolves them."""
    session.run_install(
        "uv", "sync", "--quiet", *(arguments or ("--all-packages", "--all-extras")), "--group", group,
        env={"UV_PROJECT_ENVIRONMENT": session.virtualenv.location}, external=True,
    )  # fmt: skip


def _install_wheels(session: nox.Session, package: str, *constraints: str) -> None:
    """Build the wheels a package's tests need and install them by path: an index would serve a stale build."""
    out = Path(session.create_tmp()).absolute() / "wheels"
    shutil.rmtree(out, ignore_errors=True)
    wheels: list[str] = []
    for name in _workspace_closure({package, "titan-testing"}):
        session.run_install(
            "uv", "build", "--quiet", "--wheel", "--package", name, "--out-dir", str(out), external=True
        )
        wheel = next(out.glob(f"{name.replace('-', '_')}-*.whl"))
        extras = _extras_for_tests(name) if name == package else []
        wheels.append(f"{name}[{','.join(extras)}] @ file://{wheel}" if extras else str(wheel))
    session.install("--quiet", *wheels, *TEST_TOOLS, *constraints)


def _workspace_closure(names: set[str]) -> list[str]:
    """The members that these members need, themselves included."""
    todo, closure = list(names), set(names)
    while todo:
        for requirement in _project(todo.pop())["dependencies"]:
            name = next((member for member in PACKAGES if requirement.startswith(member)), None)
            if name and name not in closure:
                closure.add(name)
                todo.append(name)
    return sorted(closure)


def _extras_for_tests(package: str) -> list[str]:
    return list(_project(package).get("optional-dependencies", {}))


def _project(package: str) -> dict[str, dict[str, list[str]]]:
    return tomllib.loads((_folder(package) / "pyproject.toml").read_text())["project"]


def _folder(package: str) -> Path:
    return ROOT / ("testing" if package == "titan-testing" else "packages") / package
