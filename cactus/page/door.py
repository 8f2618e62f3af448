"""Checks at the door of the page: what a browser sent becomes a request, or one sentence at the field that is wrong, before the queue."""

import math
from collections.abc import Callable

import gradio as gr

from cactus.page.choices import CHOICES
from cactus.page.comparison import Request
from cactus.page.models import Models
from cactus.page.strings import STRINGS
from cactus.pairs import PromptError
from cactus.rules import Rule
from cactus.sampling import Sampling
from cactus.trace import Settings

LARGEST = 1e300  # JSON writes whole numbers of any length, beyond what a float holds
MAX_DELTA, MAX_M, MAX_LENGTH, MAX_PROMPT_CHARS = 2.0, 16, 512, 20_000


def request(
    models: Models, prompt, delta, m, temperature, top_k, top_p, length, seed, chat, pair, bits, left, right, left_parameter,
    right_parameter, auto,
) -> Request:  # fmt: skip
    """What a visitor asked for. Raises ValueError with a sentence for a value out of range."""
    sampling = Sampling(number(temperature), whole(top_k, "Top-k"), number(top_p))
    settings = Settings(sampling, whole(m, "m"), whole(length, "The length"), whole(seed, "The seed"))
    rules = rule(left, delta, left_parameter), rule(right, delta, right_parameter)
    return Request(prompt, rules, settings, bool(chat), models.key(pair, bits), bool(auto))


def rule(name: str, delta: float | None, parameter: float | None) -> Rule:
    """The rule of a pane: Cactus with the page's delta, another with its own parameter or its default."""
    if name not in CHOICES:
        raise ValueError(STRINGS["error.rule"].format(names=", ".join(CHOICES)))
    choice = CHOICES[name]
    value = number(delta) if choice.takes_delta else choice.default if parameter is None else number(parameter)
    return choice.make(value)


def door(models: Models) -> Callable:
    """The validator of the Generate event: one answer per field, in the order of its inputs."""

    def check(
        prompt, delta, m, temperature, top_k, top_p, length, seed, chat, pair, bits, left, right, left_parameter, right_parameter,
        auto,
    ):  # fmt: skip
        checks = [
            lambda: _prompt(models, prompt, length, chat, models.key(pair, bits)),
            lambda: within(delta, 0, MAX_DELTA, STRINGS["control.delta"]),
            lambda: within(whole(m, "m"), 1, MAX_M, "m"),
            lambda: Sampling(temperature=number(temperature)),
            lambda: Sampling(top_k=whole(top_k, "Top-k")),
            lambda: Sampling(top_p=number(top_p)),
            lambda: within(whole(length, "The length"), 1, MAX_LENGTH, STRINGS["control.length"]),
            lambda: Settings(seed=whole(seed, "The seed")),
            lambda: None,
            lambda: models.key(pair, bits),
            lambda: within(whole(bits, "bits"), 3, 8, STRINGS["control.bits"]),
            lambda: rule(left, 0.0, None),
            lambda: rule(right, 0.0, None),
            lambda: rule(left, 0.0, left_parameter),
            lambda: rule(right, 0.0, right_parameter),
            lambda: None,
        ]
        return [gr.validate(not (said := _complaint(one)), said) for one in checks]

    return check


def _prompt(models: Models, prompt: str, length: float, chat: bool, key) -> None:
    if len(prompt) > MAX_PROMPT_CHARS:
        raise ValueError(STRINGS["error.long"].format(chars=len(prompt), limit=MAX_PROMPT_CHARS))
    if not prompt.strip():
        raise PromptError(STRINGS["error.empty"])
    pair = models.loaded()
    if pair and key == models.current():
        pair.check(pair.encode(prompt, chat), Settings(max_new_tokens=whole(length, "The length")))


def whole(value: float | None, name: str) -> int:
    """A whole number that came from a browser. Raises ValueError with a sentence for an empty field, NaN or a fraction."""
    if not math.isfinite(number(value)) or value != int(value):
        raise ValueError(STRINGS["error.whole"].format(name=name, value="nothing" if value is None else value))
    return int(value)


def number(value) -> float:
    """A number that came from a browser; an empty field, text or anything else is NaN, which no range admits."""
    plain = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
    return value if plain else math.nan


def within(value: float | None, low: float, high: float, name: str) -> None:
    """Raises ValueError with a sentence for what is no number in low..high."""
    if not low <= number(value) <= high:
        raise ValueError(STRINGS["error.range"].format(name=name, low=low, high=high, value="nothing" if value is None else value))


def _complaint(check: Callable[[], object]) -> str:
    try:
        check()
    except ValueError as error:
        return str(error)
    return ""
