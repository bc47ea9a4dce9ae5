"""The words of `generate`, from a caller, a generation config or the model's files: which hold with a cache of ours.

What a caller says and cannot be is refused. What the model's own files say about caches gives way to the cache that was
asked for, since it was said for another one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

from kvtailor.errors import CacheMisuse, UnknownName
from kvtailor.hf.versions import CACHE_ARGUMENTS, template_variables

__all__ = ["check_no_template", "known_words", "left_out", "own_words", "told", "words_of"]

# Not of how a text is written: special tokens, what is returned beside it, and what transformers notes for itself.
_NOT_OF_WRITING = frozenset(
    {
        "bos_token_id",
        "decoder_start_token_id",
        "eos_token_id",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "pad_token_id",
        "return_dict_in_generate",
        "transformers_version",
    }
)
# What a stream of one text from one cache of ours cannot follow.
_ONE_TEXT = frozenset(
    {
        "cache_config",
        "cache_implementation",
        "max_cache_len",
        "num_beams",
        "num_return_sequences",
        "prompt_lookup_num_tokens",
        "stop_strings",
        "use_cache",
        "use_mtp",
    }
)
# Of chat templates, whose ids are made before `generate`; a tokenizer's own template tells of more.
_OF_TEMPLATES = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "documents", "enable_thinking", "messages"}
    | {"reasoning_effort", "system", "tools"}
)
# What the command gives itself.
_GIVEN = frozenset({"do_sample", "max_length", "max_new_tokens", "prefill_chunk_size", "temperature"})
# Taken by `generate`, though they stand in no signature.
_UNSIGNED = ("tokenizer", "assistant_tokenizer")


def known_words(model: Any) -> set[str]:
    """Every name that `model.generate` takes, by this transformers and this model."""
    signed = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    taken = set(inspect.signature(type(model).forward).parameters) - {"self", "args", "kwargs"}
    return {
        *signed,
        *taken,
        *GenerationConfig().to_dict(),
        *vars(model.generation_config),
        *_UNSIGNED,
        *CACHE_ARGUMENTS,
    }


def check_no_template(name: str, tokenizer: Any = None) -> None:
    """Raise where a word is one of chat templates, which write a prompt before `generate` gets it.

    Args:
        name: no argument of `generate`.
        tokenizer: whose template is looked at too; None: not known.

    Raises:
        CacheMisuse: it is.
    """
    text = getattr(tokenizer, "chat_template", None)
    if name in _OF_TEMPLATES or (isinstance(text, str) and name in (template_variables(text) or ())):
        alone = name in ("messages", "system")
        asked = "messages" if alone else f"messages, {name}=..."
        how = {"messages": "", "system": " with system="}.get(name, f" with template={{{name!r}: ...}}")
        raise CacheMisuse(
            f"{name} is of the chat template, and generate takes the token ids that it has written: "
            f"tokenizer.apply_chat_template({asked}, add_generation_prompt=True) writes them, as kvtailor.read and "
            f"kvtailor.ask{how} do from a context and questions"
        )


def own_words(model: Any) -> dict[str, Any]:
    """What the model's generation config says of how a text is written, without what is so for every model."""
    usual = {name: value for name, value in GenerationConfig().to_dict().items() if value is not None} | _usual(model)
    said = vars(model.generation_config)
    return {
        name: value
        for name, value in said.items()
        if name not in _NOT_OF_WRITING and name[0] != "_" and value not in (None, usual.get(name))
    }


def left_out(model: Any, temperature: float) -> dict[str, Any]:
    """Return arguments that keep `generate` from following the model's files where a decoder promises otherwise.

    At temperature 0 the likeliest token is promised, so all goes that changes it; above it, what writes several texts
    or drafts. `stop_strings` always need a tokenizer, and go too.
    """
    usual = _usual(model)
    own = own_words(model).keys()
    gone = own if temperature == 0 else {name for name in own if name in _ONE_TEXT}
    return {name: usual.get(name) for name in gone - _GIVEN}


def told(model: Any, temperature: float) -> str | None:
    """Return what `left_out` takes from the model's files and what is followed, in a sentence; None: nothing there."""
    own, gone = own_words(model), left_out(model, temperature)
    away = ", ".join(f"{name}={own[name]!r}" for name in gone)
    kept = ", ".join(f"{name}={value!r}" for name, value in own.items() if name not in gone and name not in _GIVEN)
    parts = [f"leaves out {away}" if away else "", f"follows {kept}" if kept else ""]
    said = " and ".join(part for part in parts if part)
    return f"Of the model's generation_config.json this run {said}." if said else None


def words_of(model: Any, given: Mapping[str, Any], *, tokenizer: Any = None) -> dict[str, Any]:
    """Return the arguments for `model.generate` beside a cache of ours.

    Args:
        model: a transformers decoder-only model.
        given: by the caller, `generation_config` among them.
        tokenizer: of the model, for `stop_strings`; None: not known.

    Raises:
        UnknownName: neither `generate` nor the model takes such an argument.
        CacheMisuse: the caller asks for another cache or for none, or for what a chat template takes, or the model's
            files say what cannot be.
    """
    known = known_words(model)
    for name in given:
        if name not in known:
            check_no_template(name, tokenizer)
            raise UnknownName("argument of generate", name, known)
    moved: dict[str, Any] = getattr(model.config, "_get_generation_parameters", dict)()
    if moved and given.get("generation_config") is None:
        said = ", ".join(f"{name}={value!r}" for name, value in moved.items())
        raise CacheMisuse(
            f"the model's configuration (config.json) says {said}, which transformers takes from "
            "generation_config.json alone: move it there, or set it to None on model.config"
        )
    words = dict(given)
    for where, said_there in _places(model, given):
        of_caller = where != "the model's generation config (generation_config.json)"
        if said_there.get("cache_implementation") is not None:
            if of_caller:
                raise CacheMisuse(
                    f"{where}: cache_implementation={said_there['cache_implementation']!r} asks for a cache of "
                    "transformers, and the plan makes its own: leave it out"
                )
            words["cache_implementation"] = None
        if said_there.get("use_cache") is False:
            if of_caller:
                raise CacheMisuse(
                    f"{where}: use_cache=False feeds the whole text again at every token, and nothing would be "
                    "compressed: leave it out"
                )
            words["use_cache"] = True
        if said_there.get("stop_strings") is not None and words.get("tokenizer") is None:
            if tokenizer is None:
                raise CacheMisuse(
                    f"{where}: stop_strings={said_there['stop_strings']!r} are found in text, which takes the model's "
                    "tokenizer: give tokenizer= as well"
                )
            words["tokenizer"] = tokenizer
    return words


def _usual(model: Any) -> dict[str, Any]:
    """What `generate` takes where no place says anything; none in a transformers that keeps it in the config itself."""
    found: dict[str, Any] = getattr(model.generation_config, "_get_default_generation_params", dict)()
    return found


def _places(model: Any, given: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where words stand, and what is said there and holds: a nearer place hides what a farther one says."""
    config = given.get("generation_config")
    hidden = {name for name, value in given.items() if value is not None}
    yield "an argument of this call", given
    if config is not None:
        said = {name: value for name, value in vars(config).items() if name not in hidden}
        yield "the generation_config that was given", said
        hidden |= {name for name, value in said.items() if value is not None}
    own = vars(model.generation_config)
    yield (
        "the model's generation config (generation_config.json)",
        {name: value for name, value in own.items() if name not in hidden},
    )
