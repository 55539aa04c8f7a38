"""Serve a run's model on this machine, by OpenAI's protocol.

`titan-train serve runs/quickstart` answers at http://127.0.0.1:8000: a page to chat in, and /v1/models, /v1/completions and
/v1/chat/completions for any client of that protocol. For trying a model: one request at a time, no authentication. Needs
the extra `serve`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_train.cli.parser import CommandParser, integer


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's folder, such as runs/quickstart")
    parser.add_argument("--port", type=integer(0, 65535), default=8000, help="0 takes a free one; default 8000")
    parser.add_argument("--max-new-tokens", type=integer(1), default=512, metavar="N", help="per answer; default 512")
    longest = "tokens of one prompt (default: the sequence length of the run)"
    parser.add_argument("--max-prompt-tokens", type=integer(1), default=0, metavar="N", help=longest)
    parser.add_argument(
        "--max-answers", type=integer(1, 1024), default=16, metavar="N", help="of one request; default 16"
    )
    parser.add_argument("--step", type=integer(0), default=None, help="checkpoint to use (default: the last)")
    parser.add_argument("--compile", action="store_true", help="compile the step of one token, for a GPU")
    parser.add_trust()
    arguments = parser.parse_args(words)

    from titan_train.serve.loopback import serve_on_loopback

    def build() -> tuple[Any, str]:
        from titan_train.generation import load_run
        from titan_train.serve.app import build_app

        run = load_run(arguments.run_dir, step=arguments.step, trust_code=arguments.trust_code, code=arguments.code)
        name = arguments.run_dir.resolve().name
        app = build_app(
            run, name, max_new_tokens=arguments.max_new_tokens, max_prompt_tokens=arguments.max_prompt_tokens,
            max_answers=arguments.max_answers, compiled=arguments.compile,
        )  # fmt: skip
        return app, f"{name}, step {run.step}"

    serve_on_loopback("serving", arguments.port, build)
    return 0
