"""The pytest plugin: skips for GPU and slow tests, one thread a process, a browser."""

import gc
import os
from collections.abc import Iterator

import pytest

from titan_testing.browser import BROWSER, Browser


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--gpu`` and ``--slow``, which run what is skipped by default."""
    parser.addoption("--gpu", action="store_true", help="run tests marked gpu or multi_gpu, where the devices exist")
    parser.addoption("--slow", action="store_true", help="run tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    """Pin one thread a process: several ranks share few cores, and oversubscription makes tests slow and noisy."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip ``gpu``, ``multi_gpu`` and ``slow`` tests unless they were asked for and can run here."""
    # markers, not keywords: those hold the names of folders too
    import torch

    devices = torch.cuda.device_count() if config.getoption("--gpu") else 0
    for item in items:
        if item.get_closest_marker("gpu") and devices < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device and --gpu"))
        if item.get_closest_marker("multi_gpu") and devices < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices and --gpu"))
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Hide what was imported and collected from the garbage collector, whose every full pass would walk all of torch."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Show it again: libraries that count what is left at exit would call it a leak."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for all tests; they are skipped where there is none."""
    if BROWSER is None:
        pytest.skip("needs chromium or chrome")
    with Browser(tmp_path_factory.mktemp("browser")) as started:
        yield started
