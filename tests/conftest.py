"""Hypothesis profiles: `default` for every day, `ci` (more, and the same each time), `fuzz` (long).

HYPOTHESIS_PROFILE chooses one: `HYPOTHESIS_PROFILE=fuzz pytest tests/test_fold.py`.
And the fixtures that several files share.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser

    from support.oracle import Oracle

# Threads that wait sleep instead of spinning: tests must not crawl on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Shells start background jobs with these ignored, and child processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

settings.register_profile(
    "default",
    max_examples=60,
    stateful_step_count=30,
    deadline=None,  # a busy machine is no fault
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "ci", settings.get_profile("default"), max_examples=150, derandomize=True, database=None
)
settings.register_profile(
    "fuzz", settings.get_profile("default"), max_examples=5000, stateful_step_count=80
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_finish() -> None:
    """What the modules hold is never garbage: no collection has to go through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the traces article.jsonl, crowded.jsonl and chunked.jsonl, to be read only."""
    from support import cli_traces as made  # noqa: PLC0415 - loads the engine, which few tests need

    folder = tmp_path_factory.mktemp("traces")
    made.write_trace(folder / "article.jsonl", made.article_run())
    made.write_trace(folder / "crowded.jsonl", made.crowded_run())
    made.write_trace(folder / "chunked.jsonl", made.chunked_run())
    return folder


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """A tiny random model without a tokenizer, not to be changed, and transformers' answers."""
    from support.oracle import Oracle  # noqa: PLC0415 - loads transformers, which few tests need

    return Oracle.create(tmp_path_factory.mktemp("model"))


@pytest.fixture
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns that can show any letter."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, or the one that CHROMIUM names."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - few tests need it

    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.fail("no Chromium: `apt-get install chromium`, or CHROMIUM=/path make test-slow")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()
