"""Traces out and in."""

import json

import pytest
from test_decoding import PLAIN, PROMPT, run
from toys import toy_pair

from cactus.rules import TAS, Cactus, SpS
from cactus.sampling import Sampling
from cactus.trace import Settings, read_traces, rule_from_json, rule_to_json


@pytest.mark.parametrize("rule", [SpS(), Cactus(0.1), Cactus(0.3, "exact"), TAS()])
@pytest.mark.parametrize("sampling", [PLAIN, Sampling(0.6, 5, 0.9), Sampling(0)])
def test_round_trip_is_equal(rule, sampling):
    traces = [run(toy_pair(eos_ids=(3,)), rule, Settings(sampling, 4, 40, seed)) for seed in (0, 2**63 - 1)]
    lines = [line for trace in traces for line in trace.lines()]
    assert all("\n" not in line for line in lines)
    assert read_traces(lines) == traces
    assert rule_from_json(rule_to_json(rule)) == rule


def test_a_stopped_run_can_be_read_without_its_last_line():
    trace = run(toy_pair(), SpS(), Settings(PLAIN, 4, 40))
    (again,) = read_traces(list(trace.lines())[:4])
    assert again.rounds == trace.rounds[:3]
    assert again.stop is None
    assert again.ids == trace.ids[: len(again.ids)]


def test_every_drafted_token_is_there():
    trace = run(toy_pair(), SpS(), Settings(PLAIN, 4, 40))
    for round in trace.rounds[:-1]:
        assert len(round.drafted) == 4
        assert [token.index for token in round.drafted] == list(range(round.drafted[0].index, round.drafted[0].index + 4))
    assert {token.outcome for token in trace.drafted} == {"accepted", "rejected", "discarded"}
    assert trace.prompt_ids == PROMPT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: ["nonsense"], "Line 1 is not part of a Cactus trace"),
        (lambda lines: lines[1:], "Line 1 is not part"),
        (lambda lines: [json.dumps(json.loads(lines[0]) | {"schema": 99})], "schema 99"),
        (lambda lines: [lines[0].replace('"sps"', '"magic"')], "Unknown rule 'magic'"),
        (lambda lines: [lines[0], '{"record":"round"}'], "Line 2"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(change, message):
    lines = list(run(toy_pair(), SpS(), Settings(PLAIN, 2, 10)).lines())
    with pytest.raises(ValueError, match=message):
        read_traces(change(lines))
