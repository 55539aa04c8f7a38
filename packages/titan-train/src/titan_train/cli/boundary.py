"""Where errors become exit codes: one message, no traceback. The traceback of a defect of ours is kept in a file.

0 success, 1 the run or the system failed, 2 the input cannot work, 130 interrupted.
"""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Generator
from types import CodeType
from typing import Any

from titan_train.launch.supervise.requests import signal_handlers
from titan_train.terminal import clean_output, first_line, printable, shortened

_TOO_LARGE = "storage size calculation overflowed"
_ALLOCATION = ("allocate memory", "out of memory")


def exit_code(command: Callable[[], int]) -> int:
    """Call the command; report what it raises in one message on stderr, and return the exit code."""
    logging.raiseExceptions = False  # a library's malformed log message is not a failure of the command
    try:
        with _interrupts_are_ours(), _no_interrupt_swallowed(), clean_output():
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
    except MemoryError as err:
        detail = f" ({err})" if str(err) else ""
        return _end(f"there is not enough memory for what was asked{detail}. Ask for less, or use a larger machine.", 1)
    except SystemExit:
        raise
    except BaseException as err:
        return _of_a_library(err)


class _Interrupt(KeyboardInterrupt):
    """Ctrl-C. `python -m` ends by the signal, not with our code, if a plain KeyboardInterrupt has left an ``exec`` of text,
    which dataclasses use, even where it was handled (CPython's ``run_eval_code_obj``).
    """


def interrupt(_number: int, _frame: object) -> None:
    """A signal handler that ends the command as Ctrl-C does."""
    raise _Interrupt


def _interrupts_are_ours() -> contextlib.AbstractContextManager[None]:
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ours = ours and threading.current_thread() is threading.main_thread()  # no other one may set handlers
    return signal_handlers({signal.SIGINT: interrupt} if ours else {})


@contextlib.contextmanager
def _no_interrupt_swallowed() -> Generator[None]:
    """Raise again an interrupt that came where Python cannot raise it: in a callback of an import, or in a finalizer."""
    before, ended, sending = sys.unraisablehook, threading.Event(), threading.Lock()

    def hook(swallowed: Any) -> None:
        if issubclass(swallowed.exc_type, KeyboardInterrupt):
            threading.Thread(target=_interrupt_after, args=(hook.__code__, ended, sending), daemon=True).start()
        else:
            before(swallowed)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
        with sending:  # from here on none is sent; one that was is raised here at the latest
            ended.set()


def _interrupt_after(code: CodeType, ended: threading.Event, sending: threading.Lock) -> None:
    """Interrupt the main thread once it has left ``code``, where an interrupt would be swallowed like the first."""
    main = threading.main_thread().ident
    assert main is not None
    while not ended.wait(0.01):
        frame = sys._current_frames().get(main)  # pyright: ignore[reportPrivateUsage]
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        with sending:
            if frame is None and not ended.is_set():
                signal.pthread_kill(main, signal.SIGINT)  # a signal ends a sleep or a read too; a flag does not
                return


def _of_a_library(err: BaseException) -> int:
    if type(err).__name__ == "PanicException":  # a panic in a Rust extension, such as tiktoken's
        return _end(f"a library failed on this input: {first_line(err)}", 2)
    if isinstance(err, RuntimeError):
        if "determine home directory" in str(err):  # pathlib's own error
            return _end(
                "a path begins with ~ and the name of a user that this machine does not have. Write it whole.", 2
            )
        if _TOO_LARGE in str(err).lower():
            return _end(f"a size is too large: {first_line(err)}. Choose a smaller one.", 2)
        if any(sign in str(err).lower() for sign in _ALLOCATION):
            return _end(f"there is not enough memory for what was asked ({first_line(err)})", 1)
        from titan_train.trust.owner import raised_in

        if raised_in(err)[0] == "titan":  # the world failed us, and the message says how
            return _end(str(err), 1)
    return _unforeseen(err)


def _unforeseen(err: BaseException) -> int:
    """An error of the user's own code or a defect: its place in one line, its traceback in a file."""
    from titan_train.trust.owner import place_of

    text = "".join(traceback.format_exception(err))
    where, own = place_of(err)
    kept = "it could not be written to a file"
    with (
        contextlib.suppress(OSError),
        tempfile.NamedTemporaryFile(
            "w", prefix="titan-train-traceback-", suffix=".txt", delete=False, encoding="utf-8", errors="replace"
        ) as file,
    ):
        file.write(text)
        kept = f"it is in {file.name}"
    message = f"{type(err).__name__}: {shortened(first_line(err), 200)} ({where or 'an unknown place'})"
    if own:
        return _end(f"{message}. Your own code raised this or called what did. The traceback: {kept}.", 1)
    return _end(f"{message}. This is a defect of titan-train: please report it with its traceback; {kept}.", 1)


def _end(message: str, code: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        print(f"error: {printable(message)}", file=sys.stderr, flush=True)
    return code


def _system_error(err: OSError) -> str:
    """``runs/a/config.toml: Permission denied``."""
    names = " -> ".join(shortened(str(name), 200) for name in (err.filename, err.filename2) if name is not None)
    reason = err.strerror or first_line(err)
    return f"{names}: {reason}" if names else reason
