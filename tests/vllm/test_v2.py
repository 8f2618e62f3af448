"""Model Runner V2's sampler: kernels that only a GPU or Triton's interpreter runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def scenarios():
    """The interpreter must be chosen before Triton is imported, hence a process of its own."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("v2_sampler.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Cactus is active: delta 0.5 unless a request brings its own, Model Runner V2" in done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_every_request_equals_the_reference(scenarios):
    """Mixed temperatures, budgets per request, placeholders: drafted, replaced and bonus tokens are the reference's."""
    assert len(scenarios) == 3
    for seen in scenarios:
        print(seen)
        assert seen["mismatches"] == 0 and seen["close"] <= 3
        assert seen["requests"] == 120 and seen["accepted"] > 50 and seen["placeholders"] > 5


def test_logits_are_restored(scenarios):
    """Processed logprobs are read from them afterwards."""
    assert all(seen["restored"] for seen in scenarios)
