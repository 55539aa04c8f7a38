"""Export a run's model, complete and proven.

`titan-train export runs/quickstart --to hf --out model` writes a folder that transformers loads without
code of ours: weights, configuration, tokenizer and model card. `--to hf,gguf,onnx` writes one folder per target
into `--out`. Every artefact is loaded with the library that its users have (extras `hf`, `gguf`, `onnx`) and
compared with the run's model; it is written only if they agree.

For models that one process cannot hold, `torchrun --nproc-per-node 4 -m titan_train export ... --to hf` writes from four
processes: each writes its own files, and none holds the model. The first process alone writes the other targets.
"""

from collections.abc import Sequence
from pathlib import Path

from titan_train.cli.parser import CommandParser, integer, number


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's folder, such as runs/quickstart")
    parser.add_argument(
        "--to",
        default="hf",
        metavar="TARGETS",
        help="one target or several with commas: hf (Hugging Face folder, default), gguf (llama.cpp), onnx, aoti "
        "(AOTInductor package), dcp (torch's distributed checkpoint)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make; must not exist")
    parser.add_argument("--step", type=integer(0), default=None, help="checkpoint to export (default: the newest)")
    parser.add_argument(
        "--dtype",
        choices=["fp32", "bf16", "fp16", "float8", "q8_0"],
        default="bf16",
        help="dtype of the weights (default: bf16); float8 has block scales (hf), q8_0 is 8 bits in blocks (gguf)",
    )
    parser.add_argument(
        "--max-shard-gb",
        type=number(0, 1e6),
        default=5.0,
        metavar="GB",
        help="largest size of a weight file (default: 5)",
    )
    parser.add_argument("--no-gate", action="store_true", help="do not compare the folder with the run's model")
    parser.add_trust()
    arguments = parser.parse_args(words)
    if arguments.max_shard_gb <= 0:
        raise ValueError(f"--max-shard-gb={arguments.max_shard_gb} must be positive. The default is 5.")

    from titan_train.eval.ranks import cpu_ranks
    from titan_train.export.gate import as_table
    from titan_train.export.run import export_run

    with cpu_ranks() as group:
        checks = export_run(
            arguments.run_dir,
            arguments.out,
            to=arguments.to.split(","),
            step=arguments.step,
            dtype=arguments.dtype,
            max_shard_bytes=int(arguments.max_shard_gb * 1e9),
            gate=not arguments.no_gate,
            group=group,
            trust_code=arguments.trust_code,
            code=arguments.code,
        )
        if group is not None and group.rank() > 0:
            return 0
    for target, table in checks.items():
        if table:
            print((f"{target}\n" if len(checks) > 1 else "") + as_table(table))
    print(f"exported {arguments.run_dir} to {arguments.out}")
    return 0
