"""Models and tokenizers: the embedded one, a folder or a hub name; and fresh models for the demo's recipe."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from kvtailor.errors import KvtailorError, ModelNotFound
from kvtailor.hf.model import embedded
from kvtailor.hf.model.cache_dtype import set_cache_dtype
from kvtailor.hf.model.calibrated import UNTRAINED
from kvtailor.hf.model.config import (
    RANDOM,
    RANDOM_SHAPES,
    arguments_of,
    base_of,
    check_hub,
    config_of,
    is_local,
    source_of,
    unreadable,
)
from kvtailor.hf.model.processes import ALONE, Processes
from kvtailor.ops.sizes import byte_text
from kvtailor.plan.calls import check_call

__all__ = [
    "cache_stays",
    "check_device",
    "cpu_computes",
    "faster_dtype",
    "load",
    "load_bare",
    "new_model",
    "random_model",
    "save",
    "slow_here",
    "wrap_tokenizer",
]


_READS = threading.RLock()
# Files of which a tokenizer is read, the usual one first.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
# Kinds of GGUF tensors that hold numbers as they are.
_PLAIN_KINDS = frozenset({"BF16", "F16", "F32", "F64"})


@check_call
def load(
    model: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    cache_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    processes: Processes = ALONE,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model in evaluation mode, with its tokenizer.

    Args:
        model: "demo" or "demo-draft" for the embedded models (nothing is downloaded), a local folder, a GGUF file (by
            the package gguf), a folder of a PEFT adapter (by the package peft), or a name on the Hugging Face hub; or
            one of `hf.model.config.RANDOM_SHAPES`, such as "random-llama".
        dtype: of the weights. None: that of the checkpoint's own config; float32 in place of 16 bits on a CPU without
            arithmetic for them, which a warning reports.
        cache_dtype: in which the model's caches hold keys and values, unless `kvtailor.cache_for` is asked otherwise.
            None: the model's own; the checkpoint's 16 bits where the CPU has no arithmetic for them, which a warning
            reports.
        device: to put the weights on. None: CPU.
        processes: that share the model by tensor parallelism, each on a device of its own.

    Returns:
        The model and the tokenizer. The tokenizer pads on the left, and with eos if it has no pad token.

    Raises:
        ModelNotFound: neither on this disk nor had from the hub, or what is there cannot be read as a model with its
            tokenizer.
        ArgumentError: a cache of this model cannot hold `cache_dtype`.
        KvtailorError: there is no such device here, or several processes cannot share the model.
    """
    check_device(device)
    if str(model) in RANDOM_SHAPES:
        if processes.size > 1:
            raise KvtailorError(
                f"asked for {model} on {processes.size} processes: random weights are made in one; give a model that "
                "is read from a folder or the hub, such as demo"
            )
        return _with_caches(*_random(str(model), dtype, device), cache_dtype)
    source = source_of(model)
    base = base_of(source)
    if not is_local(base):
        check_hub(base)
    if dtype is None and torch.device(device or "cpu").type == "cpu" and not Path(source).is_file():
        # What cannot be read is refused below, in the words of what reads the weights.
        with suppress(KvtailorError):
            config = config_of(str(model))
            dtype = faster_dtype(config)
            if dtype is not None:
                warnings.warn(f"{model}: {slow_here(config)}", stacklevel=3)
            # A cache in another dtype than the model's was not tried where processes share it, see `cache_for`.
            if dtype is not None and cache_dtype is None and processes.size == 1:
                cache_dtype = config.get_text_config(decoder=True).dtype
                warnings.warn(f"{model}: {cache_stays(config)}", stacklevel=3)
    # transformers keeps what it does for the whole process: of two at once one may be left without weights.
    with _READS:
        tokenizer, loaded = _read(model, source, base, dtype, processes)
    if Path(source).is_file():
        warnings.warn(f"{source}: {_dequantised(Path(source), loaded)}", stacklevel=3)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if device is not None and processes.size == 1:
        loaded = loaded.to(device)
    return _with_caches(loaded.eval(), tokenizer, cache_dtype)


def _with_caches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache_dtype: torch.dtype | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if cache_dtype is not None:
        set_cache_dtype(model, cache_dtype)
    return model, tokenizer


def load_bare(model: str, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return a model without its weights: its modules alone, on the device "meta", from its configuration.

    Args:
        model: as for `load`.
        dtype: that the weights would have; None: that of the checkpoint's own config, else float32.

    Raises:
        KvtailorError: there is no such model.
    """
    config = config_of(model)
    wanted = dtype or config.get_text_config(decoder=True).dtype or torch.float32
    with torch.device("meta"):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=wanted)
    return made.eval()


def faster_dtype(config: Any) -> torch.dtype | None:
    """Return float32 for a model in 16 bits that this CPU has no arithmetic for; None: the model's own dtype is right.

    Args:
        config: of the model. One whose weights are quantised is left as it is.
    """
    own = config.get_text_config(decoder=True).dtype
    if getattr(config, "quantization_config", None) is not None or cpu_computes(own):
        return None
    return torch.float32


def cpu_computes(dtype: torch.dtype | None) -> bool:
    """Whether this CPU multiplies matrices of a dtype in it, as oneDNN says; without that it is several times slower.

    oneDNN asks the processor, and `ONEDNN_MAX_CPU_ISA` where it is set. A torch that does not tell is taken to compute.
    """
    asks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    name = asks.get(dtype) if dtype is not None else None
    if name is None or not torch.backends.mkldnn.is_available():
        return True
    told = getattr(torch.ops.mkldnn, name, None)
    return True if told is None else bool(told())


def slow_here(config: Any) -> str:
    """Return the sentence for a model that is computed in float32 because this CPU cannot do otherwise fast."""
    own = str(config.get_text_config(decoder=True).dtype).removeprefix("torch.")
    return (
        f"its weights are {own}, for which this CPU has no arithmetic (a prompt took 7 times as long), so it computes "
        f"in float32, with twice the bytes of weights; dtype={own} (--dtype {own}) keeps them"
    )


def cache_stays(config: Any) -> str:
    """Return the sentence on the caches of such a model."""
    own = str(config.get_text_config(decoder=True).dtype).removeprefix("torch.")
    return (
        f"its cache stays {own}, so that its bytes are those of a CPU with that arithmetic; cache_dtype=float32 "
        "(--cache-dtype float32) holds what is computed, in twice the bytes"
    )


def _read(
    model: str | Path, source: str, base: str, dtype: torch.dtype | str | None, processes: Processes
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """From this disk where all of it is there, without a word to the hub; else from the hub, which answers."""

    def read(local: bool) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
        tokenizer = _tokenizer(model, source, base, local)
        name, more = arguments_of(source)
        try:
            with _quietly(local=local):
                return tokenizer, AutoModelForCausalLM.from_pretrained(
                    name, dtype=dtype or "auto", local_files_only=local, **more, **_shared_by(processes)
                )
        # Weights that are not whole, of another form than the configuration, or of a type that is not known.
        except Exception as error:
            raise unreadable(model, source, "model", error) from error

    if Path(base).exists():
        return read(True)
    if is_local(base):
        try:
            return read(True)
        except ModelNotFound as error:
            # A part of it may be missing here. What is wrong with it otherwise is wrong with the hub's as well.
            try:
                check_hub(base)
            except ModelNotFound as unreachable:
                raise ModelNotFound(f"{unreachable}; what is here cannot be read: {error}") from error
    return read(False)


def _tokenizer(model: str | Path, source: str, base: str, local: bool) -> PreTrainedTokenizerBase:
    """An adapter's own tokenizer, or that of its model where its folder has none."""
    own = source == base or any((Path(source) / file).is_file() for file in _TOKENIZER_FILES)
    name, more = arguments_of(source if own else base)
    try:
        made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, padding_side="left", local_files_only=local, **more
        )
        empty = len(made.get_vocab()) <= len(made.added_tokens_decoder)
    # Of several packages, each with errors of its own.
    except Exception as error:
        # A GGUF file has its own, and `name` is its folder.
        where = source if "gguf_file" in more else name
        if not _lacks_tokenizer(where):
            raise unreadable(model, where, "tokenizer", error) from error
        empty = True
    if empty:
        # Transformers makes some an empty vocabulary without a word, in which every text is no token.
        raise ModelNotFound(
            f"{name} holds a model without a tokenizer (no {_TOKENIZER_FILES[0]}): put it there with "
            f"AutoTokenizer.from_pretrained(NAME).save_pretrained({name!r}), where NAME is the model that it was made "
            "from"
        )
    return made


def _lacks_tokenizer(folder: str) -> bool:
    return Path(folder).is_dir() and not any((Path(folder) / file).is_file() for file in _TOKENIZER_FILES)


def _dequantised(file: Path, model: PreTrainedModel) -> str:
    """What became of the codes of a GGUF file, in a sentence."""
    from gguf import GGUFReader

    kinds = Counter(str(each.tensor_type.name) for each in GGUFReader(file).tensors)
    coded = ", ".join(f"{count} in {kind}" for kind, count in kinds.most_common() if kind not in _PLAIN_KINDS)
    size = sum(each.numel() * each.element_size() for each in model.parameters())
    dtype = str(model.dtype).removeprefix("torch.")
    what = f"its tensors that hold codes ({coded}) were" if coded else "nothing of it was coded, and all of it was"
    return (
        f"{what} turned into {dtype}, {byte_text(size)} of weights where the file has "
        f"{byte_text(file.stat().st_size)}; answers are those of the codes, time and memory are not"
    )


def _shared_by(processes: Processes) -> dict[str, Any]:
    """Arguments of `from_pretrained` that let transformers shard a model over processes."""
    if processes.size == 1:
        return {}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=processes.size)}


def check_device(device: torch.device | str | None) -> torch.device:
    """Return the device of a name; None: the CPU.

    Raises:
        KvtailorError: torch does not know it, or this machine has none.
    """
    try:
        wanted = torch.device(device) if device is not None else torch.device("cpu")
    except RuntimeError as error:
        raise KvtailorError(
            f"asked for the device {str(device)!r}, which torch does not have: give cpu or cuda"
        ) from error
    here = torch.cuda.device_count() if wanted.type == "cuda" else 1
    if (wanted.index or 0) >= here:
        raise KvtailorError(
            f"asked for the device {str(device)!r}, but torch {torch.__version__} finds {here} CUDA devices here: give "
            f"{'a smaller number' if here else 'cpu'}, or install a torch for this machine's GPU"
        )
    return wanted


def _random(
    name: str, dtype: torch.dtype | str | None, device: torch.device | str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """An untrained model with the tokenizer of "demo"."""
    tokenizer = AutoTokenizer.from_pretrained(embedded.path(), padding_side="left")
    wanted = dtype if isinstance(dtype, torch.dtype) else torch.float32
    return random_model(name, dtype=wanted, device=torch.device(device or "cpu"), vocab_size=len(tokenizer)), tokenizer


def random_model(
    name: str, *, dtype: torch.dtype, device: torch.device, vocab_size: int, layers: int | None = None
) -> PreTrainedModel:
    """Return an untrained model, on one device the same at every call.

    Args:
        name: one of `hf.model.config.RANDOM_SHAPES`.
        dtype: of the weights.
        device: where they are.
        vocab_size: rows of the embedding, where the shape does not say.
        layers: how many, where not as many as the shape has; for shapes whose layers are all alike.
    """
    shape = {"vocab_size": vocab_size, "model_type": "llama", **RANDOM_SHAPES[name]}
    if layers is not None:
        shape["num_hidden_layers"] = layers
    wanted, where = dtype, device
    # The small one has the same weights on every device; of the large ones there is no room for a float32 copy.
    first = (torch.float32, torch.device("cpu")) if name == RANDOM else (wanted, where)
    with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []), first[1]:
        torch.manual_seed(0)
        made = new_model(shape.pop("model_type"), dtype=first[0], **shape)
    setattr(made, UNTRAINED, True)
    made = made.to(device=where)
    # Weights alone: the frequencies of a rotation stay float32, as they do in a model of a checkpoint. In 16 bits the
    # angles of late positions would be wrong.
    for parameter in made.parameters():
        parameter.data = parameter.data.to(wanted)
    return made.eval()


@contextmanager
def _quietly(*, local: bool) -> Iterator[None]:
    """No progress bar for weights that are read from a local folder; a download keeps its own."""
    hidden = local and logging.is_progress_bar_enabled()
    if hidden:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hidden:
            logging.enable_progress_bar()


def new_model(
    model_type: str,
    *,
    dtype: torch.dtype = torch.float32,
    rope_theta: float = 10_000.0,
    partial_rotary_factor: float = 1.0,
    **config: Any,
) -> PreTrainedModel:
    """A causal language model with fresh weights from torch's current random state.

    Args:
        model_type: of transformers, such as "llama" or "gpt_neox".
        dtype: of the weights.
        rope_theta: base of the rotary frequencies.
        partial_rotary_factor: share of a head's dimensions that is rotated.
        **config: fields of the type's config, such as ``hidden_size`` and ``num_key_value_heads``.
    """
    rope = {"rope_type": "default", "rope_theta": rope_theta}
    if partial_rotary_factor != 1.0:
        rope["partial_rotary_factor"] = partial_rotary_factor
    made: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **config, rope_parameters=rope), dtype=dtype
    )
    return made


def wrap_tokenizer(tokenizer_file: Path, *, bos: str, eos: str, pad: str, longest: int) -> PreTrainedTokenizerFast:
    """A transformers tokenizer around a ``tokenizer.json``; ``longest`` is the model's context in tokens."""
    return PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file),
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        padding_side="left",
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
    )


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path, *, shard: str = "5GB") -> None:
    """Write config, generation config, weights (safetensors, in the model's dtype) and tokenizer into ``folder``.

    ``shard`` is the largest size of one file of weights, as transformers writes sizes: "8MB".
    """
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer.save_pretrained(folder)
