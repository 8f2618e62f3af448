"""Measure the page and the decoder on this machine; prints figures beside their targets and judges nothing.

Parts: start (the server), open (the recorded run, no model loaded), slider (moving delta), live (a run, Stop, memory), runs (memory
over fifty runs), block (one draft-verify block, alone and beside a busy process). For quiet figures let nothing else run.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import serving
from gradio_client import Client
from playwright.sync_api import Browser, Page

sys.path.insert(0, str(serving.ROOT))

from cactus import threads
from cactus.pairs import EMBEDDED

PARTS = ("start", "open", "slider", "live", "runs", "block")
PROMPT = "Explain how a bicycle stays upright."
LONG = 512
RUN_MS = 600_000

# Runs before the page: when tokens and plots are there, largest contentful paint, layout shifts, long tasks, frames.
WATCH = """
window.measured = { tokens: null, plots: null, lcp: 0, cls: 0, longest: 0, frames: 0 };
const observe = (type, each) => new PerformanceObserver((list) => list.getEntries().forEach(each)).observe({ type, buffered: true });
observe('largest-contentful-paint', (entry) => { measured.lcp = entry.startTime; });
observe('layout-shift', (entry) => { if (!entry.hadRecentInput) measured.cls += entry.value; });
observe('longtask', (entry) => { measured.longest = Math.max(measured.longest, entry.duration); });
const frame = () => {
  measured.frames += 1;
  if (document.querySelector('.tokens .token')) measured.tokens ??= performance.now();
  if (document.querySelectorAll('.plot .main-svg').length > 1) measured.plots ??= performance.now();
  requestAnimationFrame(frame);
};
requestAnimationFrame(frame);
"""

# What shows that tokens are judged anew, and that the marks on the plots moved.
SLIDER = """
const slider = document.querySelector('.cactus-viewer .slider input');
const shown = {
  tokens: () => document.querySelector('.overlay-title').textContent,
  plots: () => document.querySelector('.plot-dot').style.transform,
};
const state = () => shown.tokens() + shown.plots();
const move = (at) => { slider.value = at; slider.dispatchEvent(new Event('input', { bubbles: true })); };
const frame = () => new Promise(requestAnimationFrame);
const painted = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
"""
SINGLE_MOVES = f"""async (moves) => {{
  {SLIDER}
  const times = {{ tokens: [], plots: [] }};
  for (let k = 0; k < moves; k += 1) {{
    for (const part of Object.keys(times)) {{
      const before = shown[part]();
      const start = performance.now();
      move((slider.valueAsNumber + 7) % 24);
      do await painted(); while (shown[part]() === before);
      times[part].push(performance.now() - start);
      await new Promise((done) => setTimeout(done, 100));
    }}
  }}
  return times;
}}"""
DRAG = f"""async ([events, pause]) => {{
  {SLIDER}
  let repaints = 0, last = state(), dragging = true;
  (async () => {{
    while (dragging) {{
      await painted();
      if (state() !== last) repaints += 1;
      last = state();
    }}
  }})();
  const start = performance.now();
  for (let k = 0; k < events; k += 1) {{
    while (performance.now() - start < k * pause) await new Promise((done) => setTimeout(done));
    move(k % 2 ? k % 25 : 24 - (k % 25));
  }}
  const before = last, released = performance.now();
  do await painted(); while (state() === before);
  const settled = performance.now() - released;
  dragging = false;
  return {{ repaints, settled, lasted: released - start }};
}}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="part", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--repeats", type=int, default=5, help="openings of the page whose median counts (default 5)")
    parser.add_argument("--tokens", type=int, default=96, help="length of the runs, new tokens (default 96)")
    parser.add_argument(
        "--spins",
        nargs="*",
        default=[],
        metavar="COUNT",
        help="values of GOMP_SPINCOUNT for part block, beside the one that is set",
    )
    args = parser.parse_args()
    parts = args.parts or PARTS
    say("processes that ran beside, mean of the last minute", os.getloadavg()[0], "")
    if {"open", "slider"} & set(parts):
        measure_recorded(parts, args.repeats)
    if {"start", "live", "runs"} & set(parts):
        measure_models(parts, args.tokens)
    if "block" in parts:
        measure_blocks([threads.SPINS, *args.spins], args.tokens)


def say(name: str, figure: float, unit: str, target: str = "") -> None:
    """One line: name, figure to three digits, unit, target."""
    print(f"{name:<64} {f'{figure:.3g}':>8} {unit:<6} {target and f'target {target}'}", flush=True)


def median(values) -> float:
    return statistics.median(values)


def measure_recorded(parts: list[str], repeats: int) -> None:
    """The page on a machine without models."""
    with tempfile.TemporaryDirectory() as empty:
        environment = serving.without_models(Path(empty) / "cache")
        with serving.serving(Path(empty) / "log", **environment) as server, serving.chromium() as browser:
            if "open" in parts:
                measure_opening(browser, server.url, repeats)
            if "slider" in parts:
                measure_slider(browser, server.url)


def opened(browser: Browser, url: str) -> Page:
    """The page as a new visitor sees it, with its plots drawn."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.add_init_script(WATCH)
    page.goto(url)
    page.wait_for_function("() => measured.plots !== null")
    return page


def measure_opening(browser: Browser, url: str, repeats: int) -> None:
    opened(browser, url).context.close()  # the server's own first time
    seen = []
    for _ in range(repeats):
        page = opened(browser, url)
        page.wait_for_timeout(1500)  # layout may still shift, and a larger paint come
        seen.append(page.evaluate("measured"))
        page.context.close()

    def seconds(name):
        return median(one[name] for one in seen) / 1e3

    say(f"first trace visible after opening, median of {repeats}", seconds("tokens"), "s", "≤ 2.5 s")
    say("plots visible after opening", seconds("plots"), "s")
    say("largest contentful paint", seconds("lcp"), "s")
    say("cumulative layout shift", median(one["cls"] for one in seen), "")


def measure_slider(browser: Browser, url: str) -> None:
    page = opened(browser, url)
    page.wait_for_timeout(1000)
    times = page.evaluate(SINGLE_MOVES, 20)
    for part, latencies in times.items():
        say(f"slider to {part}, median of 20 moves", median(latencies), "ms", "≤ 100 ms")
    drag = page.evaluate(DRAG, [40, 25])
    say("slider dragged, 40 events in", drag["lasted"], "ms")
    say("    repaints", drag["repaints"], "of 40")
    say("    settled after the last event", drag["settled"], "ms", "≤ 100 ms")
    page.context.close()


def measure_models(parts: list[str], tokens: int) -> None:
    """The page with the embedded pair, which must be in the cache already."""
    with tempfile.TemporaryDirectory() as folder, serving.serving(Path(folder) / "log") as server:
        if "start" in parts:
            say("server up after the command, warm cache", server.up_s, "s", "≤ 10 s")
        if "live" in parts:
            with serving.chromium() as browser:
                measure_live(browser, server, tokens)
        if "runs" in parts:
            measure_runs(server)


def measure_live(browser: Browser, server: serving.Server, tokens: int) -> None:
    page = opened(browser, server.url)
    page.wait_for_function("() => document.querySelector('#status p').textContent.startsWith('Ready')", timeout=RUN_MS)
    say("memory of the process, models loaded, peak", gigabytes(server, "VmHWM"), "GB")
    page.locator("#settings button").first.click()
    page.wait_for_timeout(1000)
    page.locator("#prompt textarea").fill(PROMPT)
    page.locator("#length input[type=number]").fill(str(tokens))
    page.wait_for_timeout(300)

    page.evaluate("() => { measured.frames = 0; measured.longest = 0; measured.start = performance.now(); }")
    page.locator("#generate").click()
    page.locator(".badge.live").wait_for()
    page.locator(".tokens .token").first.wait_for()
    first = page.evaluate("performance.now() - measured.start")
    wait_for_end(page)
    run = page.evaluate("({ ...measured, lasted: performance.now() - measured.start })")
    say(f"live run of 2 × {tokens} tokens", run["lasted"] / 1e3, "s")
    say("    first token after the click", first / 1e3, "s")
    say("    frames per second while streaming", run["frames"] / run["lasted"] * 1e3, "/s")
    say("    longest task in the browser", run["longest"], "ms")
    page.wait_for_function("() => document.querySelector('#status p').textContent.startsWith('Ready')", timeout=RUN_MS)
    say("memory of the process after the run, peak", gigabytes(server, "VmHWM"), "GB", "≤ 2 GB")

    page.locator("#length input[type=number]").fill(str(LONG))
    page.wait_for_timeout(300)
    page.locator("#generate").click()
    page.wait_for_function("() => document.querySelectorAll('.ending:not([hidden])').length === 0", timeout=RUN_MS)
    page.locator(".pane:nth-child(2) .block:nth-child(3)").wait_for(timeout=RUN_MS)
    page.evaluate("() => { measured.start = performance.now(); document.querySelector('#stop').click(); }")
    wait_for_end(page)
    say("Stop, until both panes say so", page.evaluate("performance.now() - measured.start"), "ms", "≤ 2 s")
    page.context.close()


def wait_for_end(page: Page) -> None:
    page.wait_for_function("() => document.querySelectorAll('.ending:not([hidden])').length === 2", timeout=RUN_MS)


def measure_runs(server: serving.Server) -> None:
    """Comparisons of sixteen tokens, one after the other, and what the process holds after some of them."""
    client = Client(server.url, verbose=False)
    settings = {"delta": 0.5, "m": 5, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "length": 16, "chat": True, "bits": 5}
    rules = {"left": "sps", "right": "cactus", "left_parameter": None, "right_parameter": None, "auto": False}
    for run in range(1, 51):
        client.predict(PROMPT, **settings, **rules, seed=run, pair=EMBEDDED, api_name="/generate")
        if run in (1, 10, 50):
            say(f"memory of the process after {run} run{'s' * (run > 1)}", gigabytes(server, "VmRSS"), "GB")


def gigabytes(server: serving.Server, kind: str) -> float:
    """Resident memory (Linux): VmRSS now, VmHWM the most there was."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(rf"{kind}:\s+(\d+) kB", status)[1]) * 1024 / 1e9


def measure_blocks(spins: list[str], tokens: int) -> None:
    """Seconds of a Cactus block for each spin count, alone and beside one process that never rests."""
    for count in spins:
        quiet = blocks(count, tokens)
        with busy_process():
            beside = blocks(count, tokens)
        alone, shared = (median(sum(block.values()) for block in run) for run in (quiet, beside))
        name = f"GOMP_SPINCOUNT {count}"
        if count == spins[0]:
            outside = median((block["rule"] + block["rest"]) / sum(block.values()) for block in quiet)
            say("share of a block outside the two forwards", 100 * outside, "%")
        say(f"block, {name}, alone, median", 1e3 * alone, "ms")
        say(f"block, {name}, beside a busy process, median", 1e3 * shared, "ms")
        say("    ratio", shared / alone, "×", "≤ 3×")


def blocks(spins: str, tokens: int) -> list[dict[str, float]]:
    """Seconds of the parts of each block of one run in a process of its own; the last, shortened ones left out."""
    command = [sys.executable, "-m", "cactus", "generate", PROMPT, "--json", "--max-new-tokens", str(tokens), "--seed", "7"]
    out = subprocess.run(
        command, cwd=serving.ROOT, env=os.environ | {"GOMP_SPINCOUNT": spins}, check=True, text=True, capture_output=True
    ).stdout
    rounds = [record for record in map(json.loads, out.splitlines()) if record["record"] == "round"]
    full = max(len(record["drafted"]) for record in rounds)
    return [record["seconds"] for record in rounds if len(record["drafted"]) == full]


@contextmanager
def busy_process() -> Iterator[None]:
    """One core's worth of work by somebody else."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
