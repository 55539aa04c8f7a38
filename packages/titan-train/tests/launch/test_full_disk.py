"""A run whose disk fills up while it trains: a small tmpfs of its own, and a real ENOSPC."""

import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest


def can_mount():
    if os.geteuid() or not shutil.which("unshare"):
        return False
    return subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], check=False).returncode == 0


def wait_for(condition, seconds=400.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.mark.timeout(900)
@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a tmpfs")
def test_a_run_outlives_a_full_disk_and_ends_with_the_same_losses(job, undisturbed, tmp_path):
    disk = job.folder / "runs" / "full"
    disk.mkdir(parents=True)
    words = shlex.join(
        # slow, so that the disk fills up while steps are made; on a busy machine a slow step is no hang
        job.command(
            "full", "--launch.faults", "slow rank=0 factor=30 step=5 steps=3", "--launch.straggler-factor", "0",
            "--launch.hang-least-s", "3000",
        )
    )  # fmt: skip
    script = f"mount -t tmpfs -o size=60m none {shlex.quote(str(disk))} && exec {words}"
    with (tmp_path / "told").open("w") as told:
        process = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", script], cwd=job.folder, stdout=told, stderr=told, env=job.environ()
        )
    try:
        inside = Path(f"/proc/{process.pid}/root{disk}")  # the disk as the run sees it
        metrics = inside / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and '"step":5,' in metrics.read_text())
        filler = inside / "filler"
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(bytes(100 * 2**20))
        wait_for(lambda: "lost " in (tmp_path / "told").read_text())
        time.sleep(1.0)
        assert process.poll() is None
        filler.unlink()
        process.wait(timeout=400)
        said = (tmp_path / "told").read_text()
        assert process.returncode == 0, said
        assert "Traceback" not in said.split("lost ")[0]
    finally:
        process.kill()
        process.wait()
    # the disk went with the run; the last losses were printed
    last = [line for line in said.splitlines() if line.startswith("step=12/12")]
    assert f"loss={undisturbed[12]:.4f}" in last[-1]
