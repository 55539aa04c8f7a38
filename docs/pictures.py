"""Draw the pictures of README and the guides from a run: its report, a plan's page, `watch`, and the grid of ranks.

    titan-train run quickstart
    python docs/pictures.py runs/quickstart

Needs chromium, Pillow and an environment with titan-train. Writes `docs/guides/pictures/`; look at them before you commit.
"""

import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops
from rich.console import Console
from rich.text import Text
from titan_mesh import Layout, MeshSpec, Topology, draw_svg

PICTURES = Path(__file__).parent / "guides" / "pictures"
PLAN = ["plan", "llama3_70b", "--devices", "256", "--hardware", "h100", "--seq-len", "8192", "--global-batch", "512"]
COLORS = 64


def main(run: Path) -> None:
    """Draw all of them."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("no chromium here: install it with the system's package manager")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        titan_train("report", str(run))
        shoot(browser, run / "report.html", PICTURES / "report.png", height=880)
        titan_train(*PLAN, "--out", str(there / "plan"))
        shoot(browser, there / "plan.html", PICTURES / "plan.png", height=900)
        (there / "watch.svg").write_text(terminal_svg(titan_train("watch", str(run), "--once", pty=True)), "utf-8")
        shoot(browser, there / "watch.svg", PICTURES / "watch.png", width=1000, height=900)
    layout = Layout(MeshSpec.parse("pp2 dp2 tp4"), world_size=16, topology=Topology(gpus_per_node=8))
    (PICTURES / "layout.svg").write_text(draw_svg(layout), encoding="utf-8")


def titan_train(*words: str, pty: bool = False) -> str:
    """What a command prints; with ``pty``, as on a terminal of 90 columns."""
    command = [sys.executable, "-m", "titan_train", *words]
    if pty:
        line = subprocess.list2cmdline(["env", "TERM=xterm-256color", *command])
        command = ["script", "-qec", f"stty cols 90 rows 50; {line}", "/dev/null"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def terminal_svg(printed: str) -> str:
    """A terminal's text as a picture, in fonts of this machine only."""
    console = Console(record=True, width=90, file=io.StringIO())
    last = printed[printed.rindex("\u256d") :]  # the panel is drawn again in place, from its upper left corner on
    console.print(Text.from_ansi(last.replace("\r", "").rstrip()))
    svg = console.export_svg(title="titan-train watch runs/quickstart")
    return re.sub(r"@font-face {.*?}\s*", "", svg, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")


def shoot(browser: str, page: Path, out: Path, *, width: int = 1280, height: int) -> None:
    """A page as a PNG of few colours, without its empty margin."""
    subprocess.run(
        [
            *(browser, "--headless=new", "--no-sandbox", "--hide-scrollbars", "--disable-gpu", "--virtual-time-budget=4000"),
            *(f"--window-size={width},{height}", f"--screenshot={out}", page.resolve().as_uri()),
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    image = Image.open(out).convert("RGB")
    margin = Image.new("RGB", image.size, image.getpixel((0, 0)))
    _, top, _, bottom = ImageChops.difference(image, margin).getbbox() or (0, 0, width, height)
    image = image.crop((0, max(0, top - 24), width, min(height, bottom + 24)))
    image.quantize(COLORS, dither=Image.Dither.NONE).save(out, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
