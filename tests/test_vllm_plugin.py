"""The vLLM plugin without vLLM: what it imports, which deltas it takes, which rows it touches, which vLLM it refuses.

Against vLLM itself: tests/vllm/run.
"""

import math
import subprocess
import sys
import types

import pytest
import torch

from cactus.integrations import vllm_plugin
from cactus.integrations.vllm_plugin import (
    RequestDeltas,
    UnsupportedVLLMError,
    check_request,
    check_speculation,
    check_version,
    configured_delta,
    expand_to_rows,
    find,
    parse_delta,
    shifted,
    v1_rows,
    v2_rows,
    v2_with_cactus,
)
from cactus.rules import Cactus


def test_torch_is_all_it_imports():
    """Guards against a plugin that vLLM's environment, with its older transformers and without gradio, cannot load."""
    script = (
        "import sys, torch; before = set(sys.modules); import cactus.rules, cactus.integrations.vllm_plugin;"
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "['cactus']", done.stdout + done.stderr


@pytest.mark.parametrize(("value", "delta"), [("0.5", 0.5), (" 1 ", 1.0), (0, 0.0), (2.5, 2.5), ("1e-3", 0.001)])
def test_parse_delta(value, delta):
    assert parse_delta(value, "It") == delta


@pytest.mark.parametrize("value", ["", "much", "-1", -0.1, math.nan, math.inf, "inf", True, None, [1], {}])
def test_parse_delta_refuses(value):
    with pytest.raises(ValueError, match=r"^It must be a number from 0 up \(0 is lossless\), got"):
        parse_delta(value, "It")


def test_configured_delta():
    assert configured_delta({}, {}) is None
    assert configured_delta(None, {"CACTUS_DELTA": "  "}) is None
    assert configured_delta({}, {"CACTUS_DELTA": "0.5"}) == 0.5
    assert configured_delta({"cactus": {"delta": 0}}, {}) == 0.0
    assert configured_delta({"other": 1, "cactus": {"delta": 0.5}}, {"CACTUS_DELTA": ".5"}) == 0.5


@pytest.mark.parametrize(
    ("additional_config", "variable", "message"),
    [
        ({}, "much", "The environment variable CACTUS_DELTA must be a number"),
        ({"cactus": {"delta": -1}}, "", r'additional_config\["cactus"\]\["delta"\] must be a number from 0 up'),
        ({"cactus": 0.5}, "", r'additional_config\["cactus"\] must be \{"delta": number\}, got 0.5'),
        ({"cactus": {"Delta": 0.5}}, "", "must be"),
        ({"cactus": {"delta": 0.5, "rule": "tas"}}, "", "must be"),
        ({"cactus": {"delta": 0.5}}, "1", "CACTUS_DELTA says 1 and additional_config says 0.5: give one delta"),
    ],
)
def test_bad_configurations_are_one_sentence(additional_config, variable, message):
    with pytest.raises(ValueError, match=message):
        configured_delta(additional_config, {"CACTUS_DELTA": variable})


def test_requests_are_admitted_or_told_why_not():
    check_request(0.5, 0.0, runs_v2=True)
    for value, delta, runs_v2, message in (
        (-1, 0.0, True, "cactus_delta must be a number from 0 up"),
        ("x", 0.0, True, "cactus_delta must be a number from 0 up"),
        (0.5, 1.0, False, "runs vLLM's V1 model runner, where every request has delta 1"),
        (0.5, None, True, "needs a server that speculates with Cactus"),
    ):
        with pytest.raises(ValueError, match=message):
            check_request(value, delta, runs_v2)


def test_v1_rows():
    """Three requests of 2, 0 and 3 drafted tokens, the last one greedy; a placeholder in the first."""
    cumulative, temperature = torch.tensor([2, 2, 5], dtype=torch.int32), torch.tensor([0.7, 1.0, 0.0])
    n, delta = v1_rows(torch.tensor([4, -1, 3, 2, 1], dtype=torch.int32), cumulative, temperature, 0.5)
    assert n.tolist() == [4, 0, 3, 2, 1] and n.dtype == torch.int64
    assert delta.tolist() == [0.5, 0, 0, 0, 0]


def test_v2_rows():
    """Slots 2, 0 and 1 hold requests of 2, 0 and 2 drafted tokens: row i judges the token of row i + 1, a request's last row none."""
    drafted = torch.tensor([9, 4, -1, 8, 7, 3, 5], dtype=torch.int32)
    ends, slots = torch.tensor([0, 3, 4, 7], dtype=torch.int32), torch.tensor([2, 2, 2, 0, 1, 1, 1], dtype=torch.int32)
    temperature, deltas = torch.tensor([1.0, 0.7, 0.7]), torch.tensor([9.0, 0.25, 0.5])
    n, delta = v2_rows(drafted, ends, slots, temperature, deltas)
    assert n.tolist() == [4, 0, 0, 0, 3, 5, 0]
    assert delta.tolist() == [0.5, 0, 0, 0, 0.25, 0.25, 0]
    _, delta = v2_rows(drafted, ends, slots, torch.tensor([1.0, 0.0, 0.7]), deltas)
    assert delta.tolist() == [0.5, 0, 0, 0, 0, 0, 0]


def test_shifted_rows_are_h_and_come_back_to_the_bit():
    logits = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    logits[1, :20] = -torch.inf
    before, n, delta = logits.clone(), torch.tensor([3, 4, 30, 0]), torch.tensor([0.5, 1.0, 2.0, 0.0])
    q = torch.softmax(before.double(), -1)
    with pytest.raises(KeyError), shifted(logits, n, delta):
        for row, target, token, budget in zip(logits, q, n, delta.tolist(), strict=True):
            expected = Cactus(budget).target(target, target, token)
            torch.testing.assert_close(torch.softmax(row.double(), -1), expected, atol=2e-6, rtol=0)
        assert torch.equal(logits[3], before[3])
        raise KeyError
    assert torch.equal(logits, before)


def test_expand_to_rows():
    x, cumulative = torch.tensor([0.7, 0.0, 1.3]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert torch.equal(expand_to_rows(x, cumulative, 5), x[[0, 0, 2, 2, 2]])
    cumulative = torch.tensor([1, 3, 3], dtype=torch.int32)
    assert torch.equal(expand_to_rows(x, cumulative, 3, replace_from=0, replace_to=1), torch.tensor([0.7, 1, 1]))
    filters = torch.tensor([20, 50, 1], dtype=torch.int32)
    assert expand_to_rows(filters, cumulative, 3).tolist() == [20, 50, 50]
    assert expand_to_rows(filters, cumulative, 3).dtype == torch.int32


def test_a_slot_forgets_its_last_request():
    slots = types.SimpleNamespace(np=torch.zeros(3).numpy())
    deltas = RequestDeltas(0.1, slots)
    assert deltas.add_request(1, types.SimpleNamespace(extra_args={"cactus_delta": 2, "other": 1})) is False
    assert slots.np.tolist() == [0, 2, 0]
    deltas.add_request(1, types.SimpleNamespace(extra_args=None))
    assert slots.np[1] == pytest.approx(0.1)
    with pytest.raises(ValueError, match="cactus_delta must be"):
        deltas.add_request(1, types.SimpleNamespace(extra_args={"cactus_delta": "x"}))


def test_bfloat16_logits_are_shifted_in_a_float32_copy():
    """Guards against shifting in bfloat16, which rounds the one number that counts, and against touching the model's own logits."""
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(2)).bfloat16()
    slots = types.SimpleNamespace(np=torch.ones(1).numpy(), gpu=torch.ones(1))
    seen = {}

    def rejection_sample(target_logits, draft_logits, draft_sampled, cu_num_logits, expanded_idx_mapping, temperature):
        seen["q"] = torch.softmax(target_logits.double(), -1)

    wrapped = v2_with_cactus(rejection_sample, RequestDeltas(1.0, slots))
    before = logits.clone()
    wrapped(logits, None, torch.tensor([5, 6, 7]), torch.tensor([0, 3]), torch.zeros(3, dtype=torch.int32), torch.ones(1))
    q = torch.softmax(before.double(), -1)
    for row, token in ((0, 6), (1, 7)):
        expected = Cactus(1.0).target(q[row], q[row], torch.tensor(token))
        torch.testing.assert_close(seen["q"][row], expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(seen["q"][2], q[2], atol=0, rtol=0)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("method", ["block", "synthetic", "fly"])
def test_rules_that_decide_by_themselves_are_refused(method):
    with pytest.raises(ValueError, match=f"rejection_sample_method is '{method}': leave it out"):
        check_speculation(types.SimpleNamespace(rejection_sample_method=method, method="draft_model"))


class TestVersions:
    @pytest.mark.parametrize("version", ["0.31.0", "0.32.0+cpu", "0.33.1"])
    def test_known(self, version):
        check_version(version)

    @pytest.mark.parametrize("version", ["0.30.0", "0.34.0", "1.0.0", "dev"])
    def test_unknown(self, version):
        with pytest.raises(UnsupportedVLLMError, match=f"vLLM {version} has not been tried with Cactus.*vLLM 0.31 to 0.33"):
            check_version(version)

    def test_a_changed_function_is_named(self, monkeypatch):
        """Guards against a vLLM that moved something and then samples without Cactus, silently."""
        module = types.ModuleType("stand_in")
        module.rejection_sample = lambda draft_token_ids, target_probs: None
        monkeypatch.setitem(sys.modules, "stand_in", module)
        arguments = ("draft_token_ids", "target_logits", "sampling_metadata")
        with pytest.raises(
            UnsupportedVLLMError, match=r"In vLLM 0.31.0, stand_in.rejection_sample takes no target_logits, sampling_met"
        ):
            find("stand_in", "rejection_sample", arguments, "0.31.0")
        with pytest.raises(UnsupportedVLLMError, match=r"vLLM 0.31.0 has no stand_in.RejectionSampler.__init__"):
            find("stand_in", "RejectionSampler.__init__", (), "0.31.0")
        with pytest.raises(UnsupportedVLLMError, match=r"vLLM 0.31.0 has no nowhere_at_all.x \(No module named"):
            find("nowhere_at_all", "x", (), "0.31.0")
        assert find("stand_in", "rejection_sample", ("draft_token_ids",), "0.31.0") == (module, module.rejection_sample)


def test_the_entry_point_names_register():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    module, name = project["project"]["entry-points"]["vllm.general_plugins"]["cactus"].split(":")
    assert getattr(sys.modules[module], name) is vllm_plugin.register
    assert module.rpartition(".")[0] in project["tool"]["setuptools"]["packages"]
