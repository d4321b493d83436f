"""Shared fixtures: tiny random models of several families, and the real SmolLM2 weights where they are cached."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: its own helpers are interpreted only if it is set by then

from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hilore_cli import cli
from hilore_cli.models import resolve_model
from hilore_cli.wheel_models import wheel_model_ready

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build_tiny(
    model_type: str,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
    seed: int = 0,
    **overrides,
):
    config = CONFIG_MAPPING[model_type](**{**TINY, "use_cache": False, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    return model.to(dtype).train()


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tiny models lose more to thread hand-over than they gain, and sums come out the same in every run."""
    torch.set_num_threads(1)


@pytest.fixture
def tiny_model():
    """Factory: `tiny_model("qwen3", tie_word_embeddings=True)`, random weights, train mode."""
    return build_tiny


@pytest.fixture
def tiny_llama():
    """Factory: `tiny_llama(num_hidden_layers=3, dtype=torch.float64)`."""
    return lambda **overrides: build_tiny("llama", **overrides)


@pytest.fixture(scope="session")
def real_model_dir():
    """Folder of the SmolLM2 weights; tests that ask for it are skipped where they are not in the cache."""
    if not wheel_model_ready("smollm2-135m"):
        pytest.skip("SmolLM2 weights are not in the cache folder: run `make demo`, or set HILORE_CACHE")
    return resolve_model("smollm2-135m")


@pytest.fixture
def here(monkeypatch, capfd, tmp_path):
    """Run `hilore` in this process and a folder of its own: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["hilore", *arguments])
        monkeypatch.setenv("COLUMNS", "80")
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return exit_.value.code, *capfd.readouterr()

    return run
