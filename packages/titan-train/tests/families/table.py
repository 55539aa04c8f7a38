"""Question: what does each decoder of the installed transformers do here?

Method: for every ``model_type`` of transformers' table of causal decoders, `one.family` makes a small folder by
transformers' own code and compares packed rows, stages, one step of training, exported files and greedy text with
transformers. Each family runs in a process of its own with a limit of time, so that a hang or a crash ends one row.

Output: one JSON line a family in ``--rows``; and, with ``--table``, the page of the documentation. A family that has a
line already is not run again. The last line of stdout is one JSON object.

Limits: CPU, float32, small models with random weights and a layer of each sort.

Example: python packages/titan-train/tests/families/table.py --rows rows.jsonl --table docs/reference/hf_families.md
"""

import argparse
import collections
import datetime
import json
import multiprocessing
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import one
import torch

LIMIT_S = 180.0
_NEEDED = [
    f"titan_train.{name}" for name in ("export.run", "generation.decode", "launch.validate", "models.hf.probe", "train")
]
HEAD = """# Families of transformers

What each causal decoder of transformers {transformers} does as `model.name = "hf:DIR"`, on a small folder of its own making.
`tests/families/table.py` of titan-train, which `uvx nox -s families` runs, made this page by {date},
with torch {torch} and Python {python} on the CPU, in {minutes:.0f} minutes:
{counts}.

- **packed**: the logits of a packed row are those of its documents alone in transformers. *by masks*: the family is given
  masks, as its own code makes none from positions. *refused*: `check` and `run` refuse it with `data.document_mask`.
- **stages**: a chain of pipeline stages is the whole model.
- **step**: loss and weights of one step of training are those of a plain loop over transformers' model.
- **files**: exported tensors have transformers' names, and are the same bits after transformers has read and written them.
  *by the published names*: transformers reads these, and writes others.
- **text**: greedy tokens are those of `generate` in transformers.

An empty cell follows from a refusal in the same row. A reason is the beginning of the message that a user gets.

| family | packed | stages | step | files | text |
| --- | --- | --- | --- | --- | --- |
"""


def kinds() -> list[str]:
    """Every ``model_type`` that transformers has a causal decoder for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def isolated(kind: str, limit_s: float, work: Callable[[str, Path], dict[str, str]] = one.family) -> dict[str, str]:
    """The row of one family, from a process that is ended after ``limit_s``."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    # forked from a server that has run nothing: a copy of this process could wait for locks of threads that it has not
    multiprocessing.set_forkserver_preload(["transformers", *_NEEDED])
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as scratch:  # of a process that is ended, nothing else would clean up
        process = context.Process(target=_send_row, args=(kind, sender, scratch, work))
        process.start()
        sender.close()
        try:
            return receiver.recv() if receiver.poll(limit_s) else {"packed": f"**hangs**: no end in {limit_s:.0f} s"}
        except EOFError:
            process.join(10)
            return {"packed": f"**crashes**: exit code {process.exitcode}"}
        finally:
            process.kill()
            process.join()


def _send_row(kind: str, sender: Connection, scratch: str, work: Callable[[str, Path], dict[str, str]]) -> None:
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    torch.set_num_threads(1)
    try:
        row = work(kind, Path(tempfile.mkdtemp()))
    except Exception as err:
        row = {"packed": f"**fails**: {type(err).__name__}: {str(err)[:160]}"}
    sender.send(row)


def write_table(rows: dict[str, dict[str, str]], path: Path, seconds: float, missing: Sequence[str] = ()) -> None:
    """The page, from the rows of families; ``missing`` are those that have none."""
    import transformers

    def cell(row: dict[str, str], column: str) -> str:
        words = re.sub(r"/\S*/published\b", "DIR", row.get(column, ""))
        return " ".join(words.replace("|", "\\|").split())

    head = HEAD.format(
        transformers=transformers.__version__, torch=torch.__version__.partition("+")[0], python=platform.python_version(),
        date=datetime.date.today(), minutes=seconds / 60, counts=counts(rows),
    )  # fmt: skip
    lines = [f"| {kind} | {' | '.join(cell(rows[kind], c) for c in one.COLUMNS)} |" for kind in sorted(rows)]
    end = f"\nNot run here: {', '.join(missing)}.\n" if missing else ""
    path.write_text(head + "\n".join(lines) + "\n" + end, encoding="utf-8")


def counts(rows: dict[str, dict[str, str]]) -> str:
    """How many families there are of each sort."""
    found = collections.Counter(
        "fail somewhere" if any("**" in word for word in row.values())
        else "are not built small by transformers" if row.get("packed", "").startswith(("not built", "no small", "not small"))
        else "are equal where they are not refused" if row.get("step") == "equal"
        else "are refused"
        for row in rows.values()
    )  # fmt: skip
    return "; ".join(f"{number} {what}" for what, number in found.most_common())


def main() -> int:
    """Run what has no row yet, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="model_types; none: all")
    parser.add_argument("--rows", type=Path, default=Path("families.jsonl"))
    parser.add_argument("--table", type=Path)
    parser.add_argument("--shard", default="0/1", help="every n-th family from the i-th on: i/n")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one family")
    options = parser.parse_args()
    known = _read(options.rows)
    index, count = map(int, options.shard.split("/"))
    for kind in (options.kinds or kinds())[index::count]:
        if kind in known:
            continue
        start = time.monotonic()
        row = isolated(kind, options.limit)
        with options.rows.open("a") as file:
            file.write(json.dumps({"kind": kind, "row": row, "seconds": round(time.monotonic() - start, 1)}) + "\n")
        print(kind, row, flush=True)
    known = _read(options.rows)
    rows = {kind: line["row"] for kind, line in known.items()}
    seconds = sum(line["seconds"] for line in known.values())
    if options.table:
        write_table(rows, options.table, seconds, missing=sorted(set(kinds()) - rows.keys()))
    print(json.dumps({"families": len(rows), "counts": counts(rows), "seconds": round(seconds)}))
    return int(any("**" in word for row in rows.values() for word in row.values()))


def _read(path: Path) -> dict[str, dict[str, object]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["kind"]: line for line in map(json.loads, lines)}


if __name__ == "__main__":
    sys.exit(main())
