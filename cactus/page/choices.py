"""The rules that the page offers for either pane, and how a choice becomes a rule."""

from collections.abc import Callable
from dataclasses import dataclass

from cactus.page.strings import STRINGS
from cactus.rules import TAS, Cactus, Fuzzy, Interpolation, Lenience, Mentored, Rule, SpS, TopK


@dataclass(frozen=True)
class RuleChoice:
    """A rule by the name the page knows it by. Cactus takes the page's delta; the others one parameter of their own, or none."""

    name: str
    make: Callable[[float], Rule]
    takes_delta: bool = False
    parameter: str | None = None
    default: float | None = None

    @property
    def label(self) -> str:
        return STRINGS[f"rule.{self.name}"]


def _cactus(solver: str, divergence: str) -> Callable[[float], Rule]:
    return lambda delta: Cactus(delta, solver, divergence)


CHOICES = {
    choice.name: choice
    for choice in (
        RuleChoice("sps", lambda _: SpS()),
        RuleChoice("cactus", Cactus, takes_delta=True),
        RuleChoice("cactus-exact-kl", _cactus("exact", "kl"), takes_delta=True),
        RuleChoice("cactus-exact-reverse_kl", _cactus("exact", "reverse_kl"), takes_delta=True),
        RuleChoice("cactus-exact-chi2", _cactus("exact", "chi2"), takes_delta=True),
        RuleChoice("cactus-exact-tv", _cactus("exact", "tv"), takes_delta=True),
        RuleChoice("cactus-exact-hellinger", _cactus("exact", "hellinger"), takes_delta=True),
        RuleChoice("cactus-exact-js", _cactus("exact", "js"), takes_delta=True),
        RuleChoice("tas", lambda epsilon: TAS(epsilon, epsilon**0.5), parameter="epsilon", default=0.09),
        RuleChoice("interpolation", Interpolation, parameter="weight", default=0.25),
        RuleChoice("topk", lambda k: TopK(k), parameter="k", default=5),
        RuleChoice("lenience", Lenience, parameter="lenience", default=0.5),
        RuleChoice("mentored", Mentored, parameter="budget", default=0.05),
        RuleChoice("fuzzy", Fuzzy, parameter="threshold", default=0.1),
    )
}


def name_of(rule: Rule) -> str:
    """The choice that a rule belongs to."""
    if isinstance(rule, Cactus) and (rule.solver, rule.divergence) != ("taylor", "kl"):
        return f"cactus-{rule.solver}-{rule.divergence}"
    return rule.name


def described(rule: Rule) -> dict:
    """A rule as the viewer is told of it: its kind, label, delta (None where it has none) and own parameter (None likewise)."""
    choice = CHOICES.get(name_of(rule), CHOICES[rule.name])
    parameter = choice.parameter and {"name": choice.parameter, "value": getattr(rule, choice.parameter)}
    delta = rule.delta if isinstance(rule, Cactus) else 0 if rule.name == "sps" else None
    # Re-judging on the page repeats the paper's closed form; under another divergence the draws stand as they fell.
    kind = rule.name if name_of(rule) in ("sps", "cactus") else name_of(rule)
    return {"rule": kind, "label": choice.label, "delta": delta, "parameter": parameter}
