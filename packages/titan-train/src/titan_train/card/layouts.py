"""The same small model trained under every layout in turn, by the commands that a user types."""

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from titan_train.card.proofs import Proof, first_words, largest
from titan_train.observe.log import read_metrics

LOSS = 1e-5
"""Largest difference of a loss, relative to the loss of one process."""
_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class TriedLayout:
    """How a run is cut."""

    name: str
    ranks: int
    settings: str
    """Words of the command line."""


LAYOUTS = (
    TriedLayout("fsdp 2", 2, '--parallel "dp2"'),
    TriedLayout("ddp 2", 2, '--parallel "dp_replicate2" --parallel.mode ddp'),
    TriedLayout("tp 2", 2, '--parallel "tp2"'),
    TriedLayout("pp 2, 1f1b", 2, '--parallel "pp2" --pipeline.schedule 1f1b'),
    TriedLayout("pp 2, zbv", 2, '--parallel "pp2" --pipeline.schedule zbv'),
    TriedLayout("cp 2", 2, '--parallel "cp2"'),
    TriedLayout("ep 2", 2, '--parallel "dp2 ep2"'),
    TriedLayout("tp 2 x fsdp 2", 4, '--parallel "tp2 dp2"'),
    TriedLayout("pp 2 x tp 2", 4, '--parallel "pp2 tp2" --pipeline.schedule 1f1b'),
)
"""What a card tries."""
RESUMED = ("fsdp 2", "pp 2, 1f1b")
"""Layouts that also go on from a checkpoint of one process."""


class Runs:
    """Runs of one configuration in a folder."""

    def __init__(self, config: Path, folder: Path) -> None:
        self._config, self.folder = config, folder
        self._shown = config.name

    def reference(self) -> list[float]:
        """Losses of one process.

        Raises:
            ValueError: The run is refused, or it fails.
        """
        problem = self._run(self.words("one", 1, ""))
        if problem:
            raise ValueError(problem)
        return self._losses("one")

    def words(self, name: str, ranks: int, settings: str) -> list[str]:
        """The command line of a run, after ``titan-train``."""
        return ["run", str(self._config), "--run.name", name, "--devices", str(ranks), *shlex.split(settings)]

    def shown(self, name: str, ranks: int, settings: str) -> str:
        """The command, as it is printed."""
        return f"titan-train run {self._shown} --run.name {folder_name(name)} --devices {ranks} {settings}".strip()

    def compare(self, layout: TriedLayout, want: list[float]) -> Proof:
        """Losses of three steps under a layout."""
        name = folder_name(layout.name)
        return self._compared(layout.name, name, layout.ranks, f"{layout.settings} --train.steps 3", want[:3])

    def resume(self, layout: TriedLayout, want: list[float]) -> Proof:
        """Losses of three more steps under a layout, from a checkpoint of one process."""
        name = f"resume_{folder_name(layout.name)}"
        settings = f"{layout.settings} --from {shlex.quote(str(self.folder / 'one'))}@3"
        return self._compared(f"resume on {layout.name}", name, layout.ranks, settings, want[3:])

    def _compared(self, title: str, name: str, ranks: int, settings: str, want: list[float]) -> Proof:
        problem = self._run(self.words(name, ranks, settings))
        if problem:
            refused = problem.startswith("error: ")
            return Proof(title, "refused" if refused else "fails", first_words(problem.removeprefix("error: ")))
        got = self._losses(name)
        if len(got) != len(want):
            return Proof(title, "fails", f"{len(got)} of {len(want)} steps were logged")
        off = largest(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))
        return Proof(title, "equal" if off <= LOSS else "differs", f"{off:.1e}")

    def _losses(self, name: str) -> list[float]:
        return [record.loss for record in read_metrics(self.folder / name).steps]

    def _run(self, words: list[str]) -> str:
        """Empty if it ended well; else the line that says why not."""
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "titan_train", *words],
                capture_output=True, text=True, env=env, timeout=_LIMIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"no end in {_LIMIT_S:.0f} s"
        if done.returncode == 0:
            return ""
        lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        return lines[-1] if lines else f"exit code {done.returncode}: {(done.stderr.strip() or '-').splitlines()[-1]}"


def predict(name: str, machine: str, devices: int) -> tuple[str, str]:
    """What `check` predicts for the whole model: the command, and what it prints."""
    words = [
        "check", "debug", "--model.name", name, "--model.seq-len", "4096", "--train.global-batch", str(8 * devices),
        "--train.microbatch", "1", "--train.dtype", "bf16", "--activations.checkpoint", "selective",
        "--hardware", machine, "--devices", str(devices), "--paper",
    ]  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "titan_train", *words], capture_output=True, text=True, check=False)
    return f"titan-train {shlex.join(words)}", (done.stdout.strip() or done.stderr.strip())


def folder_name(title: str) -> str:
    """A run's name."""
    return title.replace(",", "").replace(" ", "_")
