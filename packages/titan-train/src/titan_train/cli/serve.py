"""Serve a model on this machine, by OpenAI's protocol.

`titan-train serve runs/quickstart` answers at http://127.0.0.1:8000: a page to chat in, and /v1/models, /v1/completions and
/v1/chat/completions for any client of that protocol. A folder that `titan-train export` wrote (hf, onnx, aoti) or that came
from the Hugging Face hub is served too. For trying a model: one request at a time. Other machines are answered with --host and
a token only, and not over TLS. Needs the extra `serve`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_train.cli.parser import CommandParser, integer

_SHORTEST_TOKEN = 16


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    what = "a run's folder, such as runs/quickstart, or an exported one"
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help=what)
    parser.add_argument("--port", type=integer(0, 65535), default=8000, help="0 takes a free one; default 8000")
    address = (
        "address of this machine to answer other machines at, such as 0.0.0.0; needs --token-file, and has no page"
    )
    parser.add_argument("--host", metavar="ADDRESS", help=address)
    secret = "file with the token that clients must send, their api_key; at least 16 characters"
    parser.add_argument("--token-file", metavar="FILE", type=Path, help=secret)
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
    token = _token(arguments.host, arguments.token_file)

    from titan_train.serve.loopback import serve_on_loopback

    def build() -> tuple[Any, str]:
        from titan_train.serve.app import build_app
        from titan_train.serve.folder import load_served

        run = load_served(arguments.run_dir, step=arguments.step, trust_code=arguments.trust_code, code=arguments.code)
        name = arguments.run_dir.resolve().name
        app = build_app(
            run, name, max_new_tokens=arguments.max_new_tokens, max_prompt_tokens=arguments.max_prompt_tokens,
            max_answers=arguments.max_answers, compiled=arguments.compile, token=token,
        )  # fmt: skip
        return app, f"{name}, step {run.step}" if run.step else name

    serve_on_loopback("serving", arguments.port, build, host=arguments.host or "127.0.0.1")
    return 0


def _token(host: str | None, file: Path | None) -> str:
    """The token of the file; empty without one.

    Raises:
        ValueError: An address without a token, or a token that is no secret.
    """
    if file is None:
        if host is not None:
            raise ValueError(
                f"--host {host} answers other machines, so clients must send a token. Write one to a file that only you can "
                "read, such as with `openssl rand -hex 32`, and pass --token-file FILE, or leave --host out."
            )
        return ""
    from titan_train.files import read_text

    token = read_text(file).strip()
    if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(
            f"--token-file {file}: the token must be one word of at least {_SHORTEST_TOKEN} ASCII characters, such as "
            "`openssl rand -hex 32` writes."
        )
    return token
