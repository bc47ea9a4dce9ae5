"""Where a model is found by its name, and its configuration without its weights."""

from __future__ import annotations

import importlib.util
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache

from kvtailor.errors import ModelNotFound
from kvtailor.hf.model import embedded
from kvtailor.ops.files import read_text
from kvtailor.ops.sizes import byte_text

__all__ = [
    "RANDOM",
    "RANDOM_SHAPES",
    "arguments_of",
    "base_of",
    "check_hub",
    "config_of",
    "is_local",
    "source_of",
    "unreadable",
]

_PATIENCE = 3.0
"""Seconds that the hub has for its one answer, before it is taken for unreachable."""

# By which a folder of the peft package is known.
_ADAPTER = "adapter_config.json"

RANDOM = "random-llama"
"""The name of a model that is not trained: for what a plan costs, where lengths matter and answers do not."""
# What a head costs must stand to the rest of a prefill as in a real model: each query head has as many weights beside
# it as one of Llama 3.2 1B's, 1.9 million in a layer. Two layers, since some methods treat layers differently.
RANDOM_SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2304,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
_WIDE = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 131_072}
# The attention of Llama 3.1 8B, 32 query heads on 8 kv heads of 128, in a model that is small beside it: what
# `python -m benchmarks.micro` times, where the cache shall be what a token costs.
_GROUPED = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
}
# The attention of Qwen3-Next 80B, 16 query heads on 2 kv heads of 256, in one layer of four; the others keep a state of
# 32 heads of 128 x 128. Dense where the real one has experts, which no cache sees.
_HYBRID = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 262_144,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    "mlp_only_layers": list(range(8)),
}
# The layers of that one that attend, alone, in a plain model.
_ITS_ATTENTION = {name: _HYBRID[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")} | {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_hidden_layers": 2,
    "max_position_embeddings": 262_144,
}
# As many layers as a small model has, and next to no arithmetic in any: what is left of a token is the host.
_NARROW = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
RANDOM_SHAPES: dict[str, dict[str, Any]] = {
    RANDOM: RANDOM_SHAPE,
    "random-llama-gqa": _GROUPED,
    "random-llama3-8b": {**_WIDE, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128_256},
    "random-llama2-7b": {**_WIDE, "intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32_000},
    "random-qwen3-next": _HYBRID,
    "random-llama-256": _ITS_ATTENTION,
    "random-llama-narrow": _NARROW,
}
"""All of that kind, by name; the large ones have the shapes of Llama 3.1 8B and of Llama 2 7B.

"random-qwen3-next" has the layers of Qwen3-Next 80B, a hybrid, and "random-llama-256" is plain with its attention.
"random-llama-narrow" is for the time that the host takes.
"""


def source_of(model: str | Path) -> str:
    """What a model is read from: the folder of an embedded model, a folder, a GGUF file, or a name on the hub.

    Raises:
        ModelNotFound: ``model`` looks like a folder but is none, is one without a model, or takes a package that is not
            here; or the embedded weights are missing.
    """
    ours = str(model) in embedded.NAMES
    place = embedded.path(str(model)) if ours else Path(model).expanduser()
    if place.is_dir():
        _check_folder(place)
        return str(place)
    if place.is_file():
        _check_file(place)
        return str(place)
    if ours or place.is_absolute() or str(model).startswith((".", "~")):
        raise ModelNotFound(
            f"asked for model {str(model)!r}, but there is no folder {place}: "
            + (
                "install the package with its weights, or run python -m recipes.demo.export in a checkout"
                if ours
                else "give an existing folder, a hub name, or 'demo'"
            )
        )
    return str(model)


def base_of(source: str) -> str:
    """The model that a PEFT adapter was made for, as its folder says; of everything else itself."""
    folder = Path(source)
    if not _is_adapter(folder):
        return source
    try:
        said = json.loads(read_text(folder / _ADAPTER))
        base = said["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelNotFound(f"{folder / _ADAPTER} does not say which model this adapter is for: {error}") from error
    return source_of(str(base))


def arguments_of(source: str) -> tuple[str, dict[str, Any]]:
    """What `from_pretrained` of transformers is given for a source: a name or folder, and the rest."""
    file = Path(source)
    return (str(file.parent), {"gguf_file": file.name}) if file.is_file() else (source, {})


def _is_adapter(folder: Path) -> bool:
    return (folder / _ADAPTER).is_file() and not (folder / "config.json").is_file()


def _check_folder(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    if _is_adapter(folder):
        if importlib.util.find_spec("peft") is None:
            raise ModelNotFound(
                f"{folder} holds a PEFT adapter ({_ADAPTER}), not a whole model: install peft (pip install peft), or "
                "merge it into its model (merge_and_unload() of peft, then save_pretrained()) and give that folder"
            )
        return
    found = sorted(each.name for each in folder.glob("*.gguf"))
    instead = "give a folder that save_pretrained() wrote, a hub name, or 'demo'"
    if found:
        more = "" if len(found) == 1 else f" (of {len(found)})"
        instead = f"give its GGUF file, {folder / found[0]}{more}"
    raise ModelNotFound(f"asked for the model in {folder}, but it has no config.json: {instead}")


def _check_file(file: Path) -> None:
    try:
        with file.open("rb") as opened:
            magic = opened.read(4)
    except OSError as error:
        raise ModelNotFound(f"asked for the model in {file}, which cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise ModelNotFound(
            f"asked for model {str(file)!r}, which is a file and no GGUF file: give the folder that save_pretrained() "
            "wrote, a GGUF file, a hub name, or 'demo'"
        )
    if importlib.util.find_spec("gguf") is None:
        raise ModelNotFound(
            f"{file} is a GGUF file, which transformers reads with the package gguf: install it (pip install gguf), or "
            "give the folder of the model that the file was made from"
        )


def is_local(source: str) -> bool:
    """Whether a folder or file, or the configuration of a hub name in the hub's local cache, is on this disk.

    Raises:
        ModelNotFound: this cannot be the name of a model on the hub.
    """
    if Path(source).exists():
        return True
    try:
        return isinstance(try_to_load_from_cache(source, "config.json"), str)
    except ValueError as error:
        raise ModelNotFound(f"there is no folder {source!r}, and no model has such a name: {error}") from error


def check_hub(source: str) -> None:
    """Check once whether the hub can be reached, before a library tries again and again.

    Raises:
        ModelNotFound: it does not answer, or the environment forbids to contact it.
    """
    asked = (
        f"asked for model {source!r}, which is not on this disk (no such folder, and not whole in "
        f"{constants.HF_HUB_CACHE}): check the name, or give 'demo' for the embedded model. It cannot be fetched"
    )
    if constants.HF_HUB_OFFLINE:
        raise ModelNotFound(f"{asked}: HF_HUB_OFFLINE forbids to contact {constants.ENDPOINT}")
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_PATIENCE).close()
    except urllib.error.HTTPError:
        # Any answer shows that it is there.
        return
    except OSError as error:
        raise ModelNotFound(f"{asked}: {constants.ENDPOINT} does not answer ({error})") from error


def config_of(model: str) -> Any:
    """The transformers configuration of a model, see `source_of`; of an adapter, that of the model it is for.

    Raises:
        ModelNotFound: there is no such model.
    """
    from transformers import AutoConfig

    if model in RANDOM_SHAPES:
        return AutoConfig.for_model(**{"model_type": "llama", **RANDOM_SHAPES[model]})
    source = base_of(source_of(model))
    local = is_local(source)
    if not local:
        check_hub(source)
    name, more = arguments_of(source)
    try:
        return AutoConfig.from_pretrained(name, local_files_only=local, **more)
    # Of a file that is not whole, or of a type that this transformers does not have.
    except Exception as error:
        raise unreadable(model, source, "configuration", error) from error


def unreadable(model: str | Path, source: str, part: str, error: Exception) -> ModelNotFound:
    """Return the sentence on a part of a model that transformers could not read.

    Args:
        model: as it was asked for.
        source: see `source_of`.
        part: such as "tokenizer".
        error: of transformers.
    """
    reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
    if Path(source).is_file():
        return ModelNotFound(
            f"the {part} in {source} cannot be read ({reason}): the file is damaged, or only a part of it is here "
            f"({byte_text(Path(source).stat().st_size)}), or it is of a kind that transformers does not read; get it "
            "again, or give the folder of the model that it was made from"
        )
    if Path(source).exists():
        return ModelNotFound(
            f"the {part} in {source} cannot be read ({reason}): give a folder that save_pretrained() wrote whole, a "
            "hub name, or 'demo' for the embedded model"
        )
    return ModelNotFound(
        f"there is no model {str(model)!r}: it is neither a folder with a config.json nor found on the hub; check the "
        f"name, or give 'demo' for the embedded model ({reason})"
    )
