"""The page in Gradio: layout, events, checks at the door. The viewer itself is assets/viewer.js, fed with the log of records."""

import html
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import gradio as gr
import plotly

from cactus import pairs, recordings
from cactus.page import comparison, door, vocabulary
from cactus.page.choices import CHOICES
from cactus.page.comparison import Pace, Request, compare
from cactus.page.door import MAX_LENGTH, MAX_M
from cactus.page.models import MODEL_THREAD, Models
from cactus.page.records import end_line, recorded_log
from cactus.page.strings import STRINGS
from cactus.replay import GRID
from cactus.trace import Settings

ASSETS = Path(__file__).parent.parent.parent / "assets"
PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
FIRST_SCRIPTS = [
    ASSETS / name
    for name in (
        "page.js",
        "viewer.js",
        "rejudge.js",
        "mathematics.js",
        "plots.js",
        "elements.js",
        "detail.js",
        "vocabulary.js",
        "steps.js",
        "tour.js",
    )
]
SCRIPTS = [*FIRST_SCRIPTS, ASSETS / "bench.js"]
STYLES = [ASSETS / "viewer.css", ASSETS / "bench.css"]
FIRST_RECORDING = "story"
QUEUE = 16
FOLDER = f"gradio_api/file={ASSETS}/"

# Hidden until assets/page.js finds it steady; after four seconds it shows in any case.
VEIL = (
    "<style>html:not([data-cactus]) .gradio-container {visibility: hidden; animation: cactus-unveil 0s 4s forwards}"
    "@keyframes cactus-unveil {to {visibility: visible}}</style>"
)
# Gradio's own `overflow: hidden` makes its frame a scroll container, in which nothing can stay in sight while the page scrolls.
STICKY = "<style>.gradio-container {overflow: clip !important}</style>"
HEAD = (
    VEIL
    + STICKY
    + "".join(
        [f'<link rel="modulepreload" href="gradio_api/file={script}">' for script in FIRST_SCRIPTS]
        + [f'<script defer src="gradio_api/file={PLOTLY}"></script>']
    )
)
MOUNT = """
const asset = (name) => import(new URL(props.folder + name, document.baseURI));
Promise.all([asset('viewer.js'), asset('page.js')]).then(([viewer, page]) => {
  page.showWhenSteady(viewer.mount(element, props, watch, server));
});
"""
# The bench stands below everything else: its script is fetched when the visitor comes near.
BENCH = """
const near = new IntersectionObserver((seen) => {
  if (!seen.some((entry) => entry.isIntersecting)) return;
  near.disconnect();
  import(new URL(props.folder + 'bench.js', document.baseURI)).then((bench) => bench.mount(element, props));
}, { rootMargin: '800px' });
near.observe(element);
"""
STATUS = """
const line = element.querySelector('p');
const show = () => { line.textContent = props.value || ''; };
watch('value', show);
show();
import(new URL(props.folder + 'page.js', document.baseURI)).then((page) => page.openForErrors('settings'));
"""
# The delta control lives in the viewer, so that moving it needs no server; Generate takes its value along.
WITH_DELTA = "(...inputs) => { inputs[1] = window.cactusViewer ? window.cactusViewer.delta() : inputs[1]; return inputs; }"

stopped: set[str] = set()  # sessions whose visitor pressed Stop
replaced: set[str] = set()  # those where a recorded run took the place of the live one, which therefore says no more
generating: set[str] = set()  # those whose run has not ended yet


def build(models: Models) -> gr.Blocks:
    """The page for these models."""
    comparison.models = models
    gr.set_static_paths([*SCRIPTS, PLOTLY])
    first = next(recording for recording in recordings.RECORDINGS if recording.name == FIRST_RECORDING)
    defaults = Settings()
    labels = list(models.choices)
    with gr.Blocks(title=STRINGS["page.title"], analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.HTML(f"<h1>{STRINGS['page.title']}</h1><p>{STRINGS['page.lead']}</p>", elem_id="intro")
        with gr.Row(equal_height=True, elem_id="ask"):
            prompt = gr.Textbox(
                label=STRINGS["control.prompt"], value=first.prompt, lines=2, max_lines=8, scale=4, elem_id="prompt"
            )
            with gr.Column(scale=1, min_width=160):
                start = gr.Button(STRINGS["control.generate"], variant="primary", elem_id="generate")
                with gr.Row():
                    stop = gr.Button(STRINGS["control.stop"], min_width=70, elem_id="stop")
                    reset = gr.Button(STRINGS["control.reset"], min_width=70, elem_id="reset")
        status = gr.HTML(
            models.status(),
            html_template='<p role="status" aria-live="polite"></p>',
            js_on_load=STATUS,
            elem_id="status",
            min_height=24,
            folder=FOLDER,
        )
        with gr.Accordion(STRINGS["control.settings"], open=False, elem_id="settings"):
            with gr.Row():
                recording = gr.Dropdown(
                    [(STRINGS[f"recording.{item.name}"], item.name) for item in recordings.RECORDINGS],
                    value=first.name,
                    label=STRINGS["control.recording"],
                    elem_id="recording",
                )
                pair = gr.Dropdown(labels, value=labels[0], label=STRINGS["control.pair"], elem_id="pair")
                bits = gr.Radio(
                    list(pairs.EMBEDDED_BITS), value=pairs.default_bits(), label=STRINGS["control.bits"], elem_id="bits"
                )
                chat = gr.Radio(
                    [(STRINGS["control.chat"], True), (STRINGS["control.raw"], False)],
                    value=True,
                    label=STRINGS["control.template"],
                    elem_id="chat",
                )
            with gr.Row():
                names = [(choice.label, choice.name) for choice in CHOICES.values()]
                left = gr.Dropdown(names, value="sps", label=STRINGS["control.left"], elem_id="left")
                left_parameter = gr.Number(None, label=STRINGS["control.left_parameter"], visible=False, elem_id="left_parameter")
                right = gr.Dropdown(names, value="cactus", label=STRINGS["control.right"], elem_id="right")
                right_parameter = gr.Number(
                    None, label=STRINGS["control.right_parameter"], visible=False, elem_id="right_parameter"
                )
            with gr.Row():
                m = gr.Slider(1, MAX_M, defaults.num_draft_tokens, step=1, label=STRINGS["control.m"], elem_id="m")
                auto = gr.Checkbox(
                    False, label=STRINGS["control.auto"], info=STRINGS["control.auto_info"], min_width=160, elem_id="auto"
                )
                length = gr.Slider(
                    1, MAX_LENGTH, defaults.max_new_tokens, step=1, label=STRINGS["control.length"], elem_id="length"
                )
                with gr.Row():
                    seed = gr.Number(first.seed, precision=0, label=STRINGS["control.seed"], min_width=100, elem_id="seed")
                    dice = gr.Button(STRINGS["control.dice"], min_width=60, elem_id="dice")
            with gr.Row():
                temperature = gr.Slider(
                    0, 2, defaults.sampling.temperature, step=0.05, label=STRINGS["control.temperature"], elem_id="temperature"
                )
                top_k = gr.Slider(0, 200, defaults.sampling.top_k, step=1, label=STRINGS["control.top_k"], elem_id="top_k")
                top_p = gr.Slider(0, 1, defaults.sampling.top_p, step=0.01, label=STRINGS["control.top_p"], elem_id="top_p")
            gr.Examples([[item.prompt] for item in recordings.RECORDINGS], [prompt], label=STRINGS["control.examples"])
        delta = gr.Number(first.rule.delta, label="delta", visible="hidden", elem_id="delta")
        viewer = gr.HTML(
            _recorded(first.name),
            html_template='<div class="cactus-viewer"></div>',
            js_on_load=MOUNT,
            apply_default_css=False,
            elem_id="viewer",
            server_functions=[all_values],
            strings=STRINGS,
            folder=FOLDER,
        )
        gr.HTML(
            html_template='<div class="cactus-bench"></div>',
            js_on_load=BENCH,
            apply_default_css=False,
            elem_id="bench",
            min_height=600,
            strings=STRINGS,
            grid=list(GRID),
            folder=FOLDER,
        )

        rules = [left, right, left_parameter, right_parameter]
        inputs = [prompt, delta, m, temperature, top_k, top_p, length, seed, chat, pair, bits, *rules, auto]
        controls = [prompt, m, auto, temperature, top_k, top_p, length, seed, chat, pair, bits, recording, left, right]
        values = [control.value for control in controls]
        start.click(_arm, queue=False, api_visibility="private").then(
            _generate(models),
            inputs,
            [viewer, status],
            js=WITH_DELTA,
            validator=door.door(models),
            api_name="generate",
            concurrency_limit=1,
            concurrency_id="models",
            show_progress="minimal",
            show_progress_on=[status],
            trigger_mode="once",
        )
        stop.click(_halt, queue=False, api_visibility="private")

        def defaults_again(request: gr.Request) -> list:
            return [*values, _instead(first.name, request), models.status()]

        reset.click(
            defaults_again,
            None,
            [*controls, viewer, status],
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        ).then(None, js=f"() => window.cactusViewer.setDelta({first.rule.delta})")
        recording.input(_instead, recording, viewer, queue=False, show_progress="hidden", api_name="recording").then(
            models.status, None, status, queue=False, show_progress="hidden", api_visibility="private"
        )
        for choice, parameter in ((left, left_parameter), (right, right_parameter)):
            choice.change(_own_parameter, choice, parameter, queue=False, show_progress="hidden", api_visibility="private")
        dice.click(None, None, seed, js="() => Math.floor(Math.random() * 1e6)")
        timer = gr.Timer(1.0)
        timer.tick(
            lambda: (models.status(), gr.Timer(active=models.busy())),
            None,
            [status, timer],
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        )
        page.unload(_arm)
    return page.queue(max_size=QUEUE)


def all_values(asked: dict) -> dict:
    """What assets/vocabulary.js asks, and gets past the queue: one answer while no run has the models, else the reason why not."""
    return vocabulary.answer(asked, bool(generating))


def _arm(request: gr.Request) -> None:
    for sessions in (stopped, replaced):
        sessions.discard(request.session_hash)


def _halt(request: gr.Request) -> None:
    stopped.add(request.session_hash)


def _instead(name: str, request: gr.Request) -> str:
    """The log of a recorded run, once a live run has ended for it: its next block would bring the live run back."""
    session = request.session_hash
    if session in generating:
        stopped.add(session)
        replaced.add(session)
    while session in generating:
        time.sleep(0.05)
    return _recorded(name)


def _own_parameter(name: str) -> gr.Number:
    """The field of a rule's own parameter: shown with its default where the rule has one."""
    choice = CHOICES[name]
    shown = choice.parameter is not None
    return gr.Number(choice.default, visible=shown, label=STRINGS[f"parameter.{choice.parameter}"] if shown else None)


@cache
def _recorded(name: str) -> str:
    """The log of a recorded run. Raises gr.Error for a name that is none."""
    chosen = [recording for recording in recordings.RECORDINGS if recording.name == name]
    if not chosen:
        raise gr.Error(STRINGS["error.recording"])
    *traces, alone = recordings.read(chosen[0].path)
    return recorded_log(traces, alone)


def _generate(models: Models) -> Callable:
    def generate(
        prompt: str, delta: float, m: float, temperature: float, top_k: float, top_p: float, length: float, seed: float,
        chat: bool, pair: str, bits: int, left: str, right: str, left_parameter: float | None, right_parameter: float | None,
        auto: bool, request: gr.Request,
    ) -> Iterator[tuple]:  # fmt: skip
        """Run two rules on one prompt; yields the log so far (JSON Lines, see cactus/page/records.py) and a status sentence."""
        log, session = gr.skip(), request.session_hash
        generating.add(session)
        try:
            wanted = door.request(
                models, prompt, delta, m, temperature, top_k, top_p, length, seed, chat, pair, bits, left, right, left_parameter,
                right_parameter, auto,
            )  # fmt: skip
            for said in _wait(models, wanted, session):
                yield log, said
            if session not in stopped:
                for log, said in _stream(wanted, session):
                    yield log, said
            # The log once more: what is yielded last is what the API returns.
            yield gr.skip() if session in replaced else log, models.status()
        except (ValueError, RuntimeError) as error:
            yield gr.skip(), models.status()
            # The toast reads markup, and what a visitor can mend is no matter for the server's log.
            raise gr.Error(html.escape(str(error), quote=False), duration=20, print_exception=False) from error
        finally:
            for sessions in (generating, stopped, replaced):
                sessions.discard(session)

    return generate


def _wait(models: Models, wanted: Request, session: str) -> Iterator[str]:
    """Says how far loading is, until the pair is there; raises what made it fail."""
    future = models.request(wanted.key)
    while not future.done() and session not in stopped:
        yield models.status()
        time.sleep(0.25)
    if future.done():
        future.result()


def _stream(wanted: Request, session: str) -> Iterator[tuple]:
    """The log while it grows. Stop ends it between two rounds, a failure where it happens: what was logged stays, with the reason."""
    log, pace, lines = "", Pace(), compare(wanted)
    running = dict.fromkeys(range(len(wanted.rules)))
    reason, message = "stopped", None
    try:
        while session not in stopped:
            # Rounds run on the models' own thread; this one only passes them on.
            line, ended = MODEL_THREAD.submit(next, lines, (None, None)).result()
            if line is None:
                return
            running.pop(ended, None)
            log += line + "\n"
            if not running or pace.due():
                yield log, STRINGS["status.running" if running else "status.baseline"]
    except Exception as error:
        reason, message = "error", str(error)
        raise
    finally:
        MODEL_THREAD.submit(lines.close).result()
        if log and session not in replaced and not isinstance(sys.exception(), GeneratorExit):
            log += "".join(end_line(pane, reason, message) + "\n" for pane in running)
            yield log, STRINGS["status.running"]
