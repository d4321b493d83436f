"""The presets' configurations: parameter counts are those that the publishers state, and the shapes build."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from hilore_cli.errors import UsageError
from hilore_cli.models import load_config
from hilore_cli.presets import CONFIGS, PRESETS
from hilore_cli.wheel_models import wheel_model_ready

PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma2-2b": 2_614_341_888,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 4_300_079_472,
}
"""Of the model cards' safetensors, tied embeddings once."""


def parameters_with(name: str, layers: int) -> int:
    config = load_config(name)
    config.get_text_config().num_hidden_layers = layers
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_the_published_ones(name):
    """All layers of a preset have one size: two models of one and two layers tell the whole."""
    layers = load_config(name).get_text_config().num_hidden_layers
    one, two = parameters_with(name, 1), parameters_with(name, 2)
    assert one + (layers - 1) * (two - one) == PUBLISHED[name]


def test_every_preset_has_a_configuration_and_no_other():
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(PRESETS) == set(PUBLISHED)


def test_the_wheel_models_configuration_is_the_unpacked_one():
    """The one preset whose weights are at hand: what comes with hilore is what is loaded."""
    if not wheel_model_ready("smollm2-135m"):
        pytest.skip("SmolLM2 weights are not in the cache folder: run `make demo`, or set HILORE_CACHE")
    from hilore_cli.models import resolve_model

    def settings(spec) -> dict:
        known = load_config(spec).to_dict()
        return {key: value for key, value in known.items() if key not in ("_name_or_path", "transformers_version", "dtype", "use_cache")}

    assert settings("smollm2-135m") == settings(resolve_model("smollm2-135m"))


def test_a_folder_without_a_configuration_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"has no config\.json"):
        load_config(tmp_path)


@pytest.mark.parametrize("name", ["gemma3-1b", "gemma3-4b"])
def test_gemma3_alternates_its_windows(name):
    text = load_config(name).get_text_config()
    assert text.layer_types[:6] == ["sliding_attention"] * 5 + ["full_attention"]
    assert text.sliding_window == {"gemma3-1b": 512, "gemma3-4b": 1024}[name]
