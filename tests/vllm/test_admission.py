"""Requests with their own delta at vLLM's door: its own validation, called as for Model Runner V2. What a client sees, HTTP 400, is in
test_server.py."""

import types

import pytest
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from cactus.integrations import vllm_plugin


@pytest.fixture
def processor():
    """As much of an InputProcessor as is looked at before vLLM's own checks, which then fail for want of a model."""
    vllm_plugin.register()
    config = types.SimpleNamespace(
        additional_config={"cactus": {"delta": 0.0}}, speculative_config=object(), use_v2_model_runner=True
    )  # fmt: skip
    return types.SimpleNamespace(vllm_config=config)


def validate(processor, extra_args):
    InputProcessor._validate_params(processor, SamplingParams(extra_args=extra_args), ("generate",))


@pytest.mark.parametrize("value", [-0.5, "x", True, float("nan"), [1]])
def test_a_bad_delta_is_the_clients_error(processor, value):
    with pytest.raises(VLLMClientError, match="cactus_delta must be a number from 0 up"):
        validate(processor, {"cactus_delta": value})


def test_a_server_without_cactus_or_draft_says_so(processor):
    for name, value in (("additional_config", {}), ("speculative_config", None)):
        setattr(processor.vllm_config, name, value)
        with pytest.raises(VLLMClientError, match="needs a server that speculates with Cactus"):
            validate(processor, {"cactus_delta": 0.5})


@pytest.mark.parametrize("extra_args", [None, {}, {"cactus_delta": 0.5}, {"other": 1}])
def test_other_requests_go_on_to_vllms_own_checks(processor, extra_args):
    with pytest.raises(AttributeError, match="model_config"):
        validate(processor, extra_args)


def test_registering_again_changes_nothing():
    vllm_plugin.register()
    before = InputProcessor._validate_params
    vllm_plugin.register()
    assert InputProcessor._validate_params is before and not hasattr(before.__wrapped__, "__wrapped__")
