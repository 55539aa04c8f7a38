"""A network and process namespace of its own: whatever starts in it sees only loopback, and ends with it."""

import os
import shutil
import subprocess
import time
from pathlib import Path


class Isolated:
    """The namespaces, as a context manager; needs root, or user namespaces and the tools of util-linux and iproute2."""

    def __enter__(self):
        words = ["unshare", "-n", "-p", "-f", "--kill-child", "--mount-proc"]
        script = "ip link set lo up && echo up && exec sleep 100000"
        self._init = subprocess.Popen([*words, "sh", "-c", script], stdout=subprocess.PIPE, text=True)
        assert self._init.stdout.readline() == "up\n"
        self._inside = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()[0]
        return self

    def __exit__(self, *_):
        self._init.kill()
        self._init.wait()
        self._init.stdout.close()

    def command(self, words, folder="/"):
        """A command that runs ``words`` inside."""
        return ["nsenter", f"--wd={folder}", "-t", self._inside, "-n", "-p", "-m", *map(str, words)]

    def run(self, words, folder="/", **options):
        return subprocess.run(self.command(words, folder), check=False, capture_output=True, text=True, **options)

    def pids(self, words):
        """Processes inside whose command line begins so, by their numbers outside."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if words in line and (process / "ns/pid").readlink() == Path(f"/proc/{self._inside}/ns/pid").readlink():
                    found.append(int(process.name))
            except OSError:
                continue
        return found


def can_isolate():
    tools = all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip"))
    if os.geteuid() or not tools:
        return False
    return subprocess.run(["unshare", "-n", "-p", "-f", "--mount-proc", "true"], check=False).returncode == 0


def wait_for(condition, seconds=400.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
