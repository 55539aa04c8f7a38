"""Every module imports without what only Linux has, and without what Windows lacks; simulated by removing the names."""

import subprocess
import sys

import pytest

_PROGRAM = """
import importlib, os, pkgutil, signal, socket, sys
import torch, numpy, pydantic, jinja2, rich.progress, sentencepiece, tiktoken  # these know their platform themselves
import torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.pipelining
import asyncio, contextlib, multiprocessing, subprocess, tempfile
for name in ("psutil", "transformers.modeling_utils", "transformers.masking_utils", "huggingface_hub.file_download",
             "peft", "lm_eval.api.model", "lm_eval.evaluator", "starlette.applications", "uvicorn", "pyarrow",
             "accelerate", "transformers.trainer", "lightning.pytorch.plugins.io"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

LINUX = {"memfd_create", "sched_getaffinity", "posix_fadvise", "copy_file_range", "pidfd_open"}
POSIX = {
    os: LINUX | {"fork", "register_at_fork", "getuid", "geteuid", "killpg", "getpgid", "setsid", "mkfifo", "statvfs", "uname"},
    signal: {"SIGKILL", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGCHLD", "SIGSTOP", "SIGPIPE", "setitimer"},
    socket: {"AF_UNIX", "send_fds", "recv_fds"},
}
if sys.argv[1] == "win32":
    for name in ("fcntl", "resource", "termios", "pwd", "grp", "pty"):
        sys.modules[name] = None
for module, names in (POSIX if sys.argv[1] == "win32" else {os: LINUX}).items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
sys.platform = sys.argv[1]
failed = []
for package in ("titan_mesh", "titan_fsdp", "titan_pipeline", "titan_cp", "titan_fp8", "titan_ckpt", "titan_train"):
    folder = importlib.import_module(package).__path__
    for found in pkgutil.walk_packages(folder, package + "."):
        integration = found.name.rpartition("titan_ckpt.integrations.")[2]  # each is named for the library that it needs
        if integration in ("transformers", "accelerate", "lightning") and integration not in sys.modules:
            continue
        if found.name.endswith((".__main__", ".preload")):  # programs, not modules to import
            continue
        try:
            importlib.import_module(found.name)
        except Exception as error:
            failed.append(f"{found.name}: {type(error).__name__}: {error}")
print("\\n".join(failed))
sys.exit(bool(failed))
"""


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_every_module_imports(platform: str) -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, platform], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_windows_is_told_what_works_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from titan_train.cli import main

    monkeypatch.setattr(sys, "platform", "win32")
    assert main(["run", "quickstart"]) == 2
    assert "WSL 2" in capsys.readouterr().err
    assert main(["list"]) == 0
