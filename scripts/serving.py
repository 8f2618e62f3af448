"""The page's server as a process of its own, and Chromium to look at it: what the scripts and the browser tests share."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parent.parent
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
NO_CHROMIUM = "There is no Chromium: put chromium or google-chrome on PATH, or name it in the environment variable CHROMIUM."
START_SECONDS = 120


@dataclass
class Server:
    """A running page. log: file with all it prints; up_s: seconds from the command until the page was served."""

    url: str
    process: subprocess.Popen
    log: Path
    up_s: float


@contextmanager
def serving(log: Path, **environment: str | None) -> Iterator[Server]:
    """`python app.py` on a free port until the block ends; None takes a variable out of the environment."""
    port = free_port()
    changed = os.environ | {"GRADIO_ANALYTICS_ENABLED": "False"} | environment
    settled = {name: value for name, value in changed.items() if value is not None}
    command = [sys.executable, "app.py", "--port", str(port)]
    start = time.monotonic()
    with (
        log.open("w") as output,
        subprocess.Popen(command, cwd=ROOT, env=settled, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}/"
            _wait_for(url, process, log)
            yield Server(url, process, log, time.monotonic() - start)
        finally:
            process.terminate()


def without_models(cache: Path) -> dict[str, str | None]:
    """Environment of a machine that has no models and cannot fetch any: an empty cache, and an index where nobody answers."""
    return {
        "CACTUS_CACHE": str(cache),
        "PIP_INDEX_URL": "http://127.0.0.1:1/simple",
        "PIP_EXTRA_INDEX_URL": None,
        "PIP_NO_INDEX": None,
        "PIP_FIND_LINKS": None,
    }


def free_port() -> int:
    """A port nobody listens on."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def find_chromium() -> str | None:
    """The browser: what CHROMIUM names, else the first known name on PATH."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)


@contextmanager
def chromium() -> Iterator["Browser"]:
    """Headless Chromium under Playwright. Raises RuntimeError where there is none."""
    from playwright.sync_api import sync_playwright

    path = find_chromium()
    if not path:
        raise RuntimeError(NO_CHROMIUM)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_FLAGS))
        yield browser
        browser.close()


def _wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.05)
    raise RuntimeError(f"The page did not start:\n{log.read_text()}")
