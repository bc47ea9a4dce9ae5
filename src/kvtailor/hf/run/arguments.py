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
from kvtailor.plan.calls import lacked
from kvtailor.plan.calls import told as told_of

__all__ = [
    "OF_CACHES",
    "check_config",
    "check_no_template",
    "file_of",
    "in_one_answer",
    "known_words",
    "left_out",
    "own_words",
    "told",
    "words_of",
]

# Of what holds the keys and values.
OF_CACHES = frozenset({"cache_config", "cache_implementation", "max_cache_len", "use_cache"})

_OWN = "the model's generation config"

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
# What drafts, and so needs an empty cache.
_DRAFTS = frozenset({"assistant_early_exit", "assistant_model", "prompt_lookup_num_tokens", "use_mtp"})
# What is found in text.
_OF_TEXT = {"stop_strings": "are found in text", "token_healing": "writes the prompt's last token anew"}
# What a stream of one text from one cache of ours cannot follow.
_ONE_TEXT = OF_CACHES | _DRAFTS | {"is_assistant", "num_beams", "num_return_sequences"} | _OF_TEXT.keys()
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


def check_config(model: Any) -> None:
    """Raise where a model's configuration, not its generation config, has words of `generate`.

    Raises:
        CacheMisuse: it has; transformers' own `generate` refuses such a model.
    """
    moved: dict[str, Any] = getattr(model.config, "_get_generation_parameters", dict)()
    if moved:
        said = ", ".join(f"{name}={value!r}" for name, value in moved.items())
        raise CacheMisuse(
            f"the model's configuration (config.json) says {said}, which transformers takes from "
            "generation_config.json alone: move it there, or set it to None on model.config"
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


def file_of(model: Any) -> str:
    """Return the name of the file that a model's generation config stands in; of a folder without one, config.json."""
    made = getattr(model.generation_config, "_from_model_config", None)
    return "generation_config.json, or config.json where there is none" if made else "generation_config.json"


def left_out(model: Any, temperature: float) -> dict[str, Any]:
    """Return arguments that keep `generate` from following the model's files where a decoder promises otherwise.

    At temperature 0 the likeliest token is promised, so all goes that changes it; above it, what writes several texts
    or drafts. `stop_strings` and `token_healing` always need a tokenizer, and go too.
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
    return f"Of the model's {file_of(model)} this run {said}." if said else None


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
    if given.get("generation_config") is None:
        check_config(model)
    streamer = given.get("streamer")
    if streamer is not None and (what := lacked("streamer", streamer)) is not None:
        raise CacheMisuse(
            f"streamer must be {what}, such as transformers' TextStreamer(tokenizer), and is {told_of(streamer)}"
        )
    words = dict(given)
    for where, said_there in _places(model, given):
        if said_there.get("cache_implementation") is not None:
            if not where.startswith(_OWN):
                raise CacheMisuse(
                    f"{where}: cache_implementation={said_there['cache_implementation']!r} asks for a cache of "
                    "transformers, and the plan makes its own: leave it out"
                )
            words["cache_implementation"] = None
        if said_there.get("use_cache") is False:
            if not where.startswith(_OWN):
                raise CacheMisuse(
                    f"{where}: use_cache=False feeds the whole text again at every token, and nothing would be "
                    "compressed: leave it out"
                )
            words["use_cache"] = True
        for name, why in _OF_TEXT.items():
            if said_there.get(name) in (None, False) or words.get("tokenizer") is not None:
                continue
            if tokenizer is None:
                raise CacheMisuse(
                    f"{where}: {name}={said_there[name]!r} {why}, which takes the model's tokenizer: give tokenizer= "
                    "as well"
                )
            words["tokenizer"] = tokenizer
    return words


def in_one_answer(model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what takes from the model's files what one answer from a cache that has seen its context cannot follow.

    Args:
        model, given: see `words_of`.

    Raises:
        CacheMisuse: the caller asks for it.
    """
    away: dict[str, Any] = {}
    for where, said_there in _places(model, given):
        found = {name: said_there[name] for name in sorted(_DRAFTS) if said_there.get(name) not in (None, False)}
        several = said_there.get("num_return_sequences") or 1
        if where.startswith(_OWN):
            away |= dict.fromkeys(found) | ({"num_return_sequences": 1} if several > 1 else {})
        elif found:
            name, value = next(iter(found.items()))
            shown = f"={value!r}" if isinstance(value, int) else ""
            raise CacheMisuse(
                f"{where}: {name}{shown} drafts, and prompt lookup and assisted decoding need an empty cache, where a "
                "question goes on from a context: leave it out, or draft with kvtailor.generate"
            )
        elif several > 1:
            raise CacheMisuse(
                f"{where}: num_return_sequences={several}, and a question has one answer: leave it out, and ask again "
                "for another"
            )
    return away


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
    yield f"{_OWN} ({file_of(model)})", {name: value for name, value in own.items() if name not in hidden}
