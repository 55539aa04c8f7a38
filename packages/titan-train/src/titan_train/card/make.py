"""Make a card: the proofs in order, each told as it ends."""

from collections.abc import Callable
from pathlib import Path

from titan_ckpt import KeyMap

from titan_train.card import proofs
from titan_train.card.layouts import LAYOUTS, RESUMED, Runs, predict
from titan_train.card.page import Card
from titan_train.card.proofs import Comparison, Proof, attempt
from titan_train.card.subject import read_subject, settings, write_small
from titan_train.config import load_config

Tell = Callable[[Proof], None]


def make_card(name: str, work: Path, *, machine: str, devices: int, made: str, command: str, tell: Tell) -> Card:
    """Prove what works for a model.

    Args:
        name: ``hf:DIR`` or a shipped model.
        work: An empty folder for the small model and its runs.
        machine: What the prediction is for, as ``check --hardware`` names it.
        devices: How many.
        made: Date, machine and versions.
        command: The command that asked for it.
        tell: Called with each proof.

    Raises:
        ValueError: As `titan_train.card.subject.read_subject` and `write_small`, or one process cannot train the small model.
    """
    subject = read_subject(name)
    small = write_small(subject, work / "small")
    file = work / "card.toml"
    told: list[Proof] = []

    def add(proof: Proof) -> None:
        told.append(proof)
        tell(proof)

    file.write_text(settings(small, work, masked=True))
    packed = attempt("packed documents", lambda: Comparison(load_config(str(file)), small.folder).packed())
    if packed.result == "refused":
        file.write_text(settings(small, work, masked=False))
    add(packed)
    pair = Comparison(load_config(str(file)), small.folder)
    add(attempt("logits", pair.logits))
    add(attempt("gradients", pair.gradients))
    runs = Runs(file, work / "runs")
    want = runs.reference()
    out = work / "out"
    add(
        attempt(
            "files",
            lambda: _files(runs.folder / "one", small.folder, out, pair.names),
            "titan-train export runs/one --to hf --out out",
        )
    )
    add(attempt("greedy text", lambda: proofs.text(runs.folder / "one", out)))
    beside, told = told, []
    add(Proof("one process", "equal", f"loss {want[0]:.4f} to {want[-1]:.4f}", command=runs.shown("one", 1, "")))
    for layout in LAYOUTS:
        shown = runs.shown(layout.name, layout.ranks, layout.settings)
        add(attempt(layout.name, lambda layout=layout: runs.compare(layout, want), shown))
    for layout in LAYOUTS:
        if layout.name in RESUMED:
            title = f"resume on {layout.name}"
            shown = runs.shown(title, layout.ranks, f"{layout.settings} --from runs/one@3")
            add(attempt(title, lambda layout=layout: runs.resume(layout, want), shown))
    config = file.read_text().replace(f"{work}/", "")
    return Card(subject, small, beside, told, predict(name, machine, devices), made, command, config)


def _files(run: Path, published: Path, out: Path, names: KeyMap) -> Proof:
    from titan_train.export.run import export_run

    export_run(run, out, to=["hf"], dtype="fp32", gate=False)
    return proofs.files(run, published, out, names)
