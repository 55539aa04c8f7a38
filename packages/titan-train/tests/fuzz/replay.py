"""Replay one case of the fuzzer, or run many: `python packages/titan-train/tests/fuzz/replay.py --seed 17 [--count 50]`."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).parent),
    *(str(Path(__file__).parent.parent / name) for name in ("parallel", "train")),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="the first case")
    parser.add_argument("--count", type=int, default=1, help="how many cases from there on (default 1)")
    parser.add_argument("--show", action="store_true", help="only print what the cases are")
    arguments = parser.parse_args()

    import fuzz_cases
    from titan_testing import preload

    preload("titan_train.train.trainer", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")
    import fuzz_corpus
    import fuzz_run

    failed = []
    with tempfile.TemporaryDirectory() as folder:
        if not arguments.show:
            fuzz_corpus.prepare(folder)
        for seed in range(arguments.seed, arguments.seed + arguments.count):
            case = fuzz_cases.draw(seed)
            if arguments.show or arguments.count == 1:
                print(case.describe(), flush=True)
            if arguments.show:
                continue
            started = time.monotonic()
            try:
                used = fuzz_run.check(case, folder)
            except AssertionError as err:
                failed.append(seed)
                print(f"seed {seed} FAILED\n{err}", flush=True)
            else:
                shares = ", ".join(f"{name} {share:.2g}" for name, share in used.items())
                print(f"seed {seed}: {time.monotonic() - started:.1f} s; shares of the limits: {shares}", flush=True)
    print(f"{len(failed)} of {arguments.count} failed {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
