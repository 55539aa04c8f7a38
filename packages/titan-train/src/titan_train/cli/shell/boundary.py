"""Where errors become exit codes: one message, no traceback, unless the error is a defect of ours.

0 success, 1 the run or the system failed, 2 the input cannot work, 130 interrupted.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

_OURS = ("titan_mesh", "titan_fsdp", "titan_pipeline", "titan_cp", "titan_fp8", "titan_ckpt", "titan_train")
_TOO_LARGE = "storage size calculation overflowed"
_ALLOCATION = ("allocate memory", "out of memory")


def exit_code(command: Callable[[], int]) -> int:
    """Call the command; report what it raises in one message on stderr, and return the exit code."""
    try:
        return command()
    except KeyboardInterrupt:
        return _end("interrupted", 130)
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ValueError as err:  # what the user gave cannot work; the message says what would
        return _end(str(err), 2)
    except OSError as err:
        return _end(_system_error(err), 1)
    except RecursionError:
        return _end("the input is nested too deeply. Flatten its tables and lists.", 2)
    except OverflowError as err:
        return _end(f"a number is too large ({err}). Choose a smaller one.", 2)
    except MemoryError:
        return _end("there is not enough memory for what was asked. Ask for less, or use a larger machine.", 1)
    except RuntimeError as err:
        if _TOO_LARGE in str(err).lower():
            return _end(f"a size is too large: {_first_line(err)}. Choose a smaller one.", 2)
        if any(sign in str(err).lower() for sign in _ALLOCATION):
            return _end(f"there is not enough memory for what was asked ({_first_line(err)})", 1)
        if _raised_by_us(err):  # the world failed us, and the message says how
            return _end(str(err), 1)
        raise
    except BaseException as err:
        if type(err).__name__ == "PanicException":  # a panic in a Rust extension, such as tiktoken's
            return _end(f"a library failed on this input: {_first_line(err)}", 2)
        raise


def _end(message: str, code: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        print(f"error: {message}", file=sys.stderr, flush=True)
    return code


def _system_error(err: OSError) -> str:
    """``runs/a/config.toml: Permission denied``."""
    names = " -> ".join(_shortened(str(name)) for name in (err.filename, err.filename2) if name is not None)
    reason = err.strerror or _first_line(err)
    return f"{names}: {reason}" if names else reason


def _shortened(name: str) -> str:
    return name if len(name) <= 200 else f"{name[:150]}...{name[-40:]}"


def _raised_by_us(err: BaseException) -> bool:
    """Whether the error was raised in a package of ours, on purpose, and not below it."""
    frame = err.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and not set(_OURS).isdisjoint(Path(frame.tb_frame.f_code.co_filename).parts)


def _first_line(err: BaseException) -> str:
    return next((line.strip() for line in str(err).splitlines() if line.strip()), type(err).__name__)
