"""What differs between the releases of transformers that are supported (5.17 to 5.24), and what is assumed of all.

Differences are found by looking at transformers, not by its version: a branch between two releases has a version of
neither. What kvtailor reads of transformers' inner functions is listed here too, so that `broken_assumptions` names
what a new release changed before a wrong answer does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from types import CodeType
from typing import Any

from transformers import Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import utils
from transformers.generation.configuration_utils import GenerationConfig
from transformers.utils import chat_template_utils

from kvtailor.errors import CacheMisuse

__all__ = [
    "ASSISTED_LOOP",
    "ATTENTION_CACHE_ARGUMENTS",
    "CACHE_ARGUMENT",
    "CACHE_ARGUMENTS",
    "FED",
    "POSITIONS_IN_FORWARD",
    "POSITIONS_IN_GENERATE",
    "PREFILL",
    "PREPARE",
    "STATES_ARE_ASKED_FOR",
    "broken_assumptions",
    "find_cache",
    "hand_cache",
    "read_cache",
    "rename_cache",
    "template_variables",
]

# Both names of the argument by which models and `generate` take a cache, the newer one first.
CACHE_ARGUMENTS = ("cache", "past_key_values")
# The one that this transformers takes without a warning: "cache" from 5.24 on, "past_key_values" before.
CACHE_ARGUMENT = next(
    name
    for name in CACHE_ARGUMENTS
    if name in inspect.signature(utils.GenerationMixin.prepare_inputs_for_generation).parameters
)
# Every name by which the attention of some family in some release takes it.
ATTENTION_CACHE_ARGUMENTS = (*CACHE_ARGUMENTS, "past_key_value", "layer_past", "curr_past_key_values", "past")
# In releases after 5.17 a model asks the cache for a layer's states; before, it read the layer's attribute.
STATES_ARE_ASKED_FOR = hasattr(Cache, "get_conv_state")

# Functions of transformers whose frames are read, never written: the first forward of `generate`, ...
PREFILL = "_prefill"
# ... the loop of prompt lookup and assisted decoding, ...
ASSISTED_LOOP = "_assisted_decoding"
# ... the one that drops the cache of a model with long rope, of whose dict of further arguments one is changed, ...
PREPARE, FED = "prepare_inputs_for_generation", "next_sequence_length"
# ... and the two that ask a cache for its length before they read `rope_deltas`.
POSITIONS_IN_FORWARD, POSITIONS_IN_GENERATE = "compute_3d_position_ids", "_prepare_position_ids_for_generation"

# A class in whose module each of the functions above is, and the names in it that kvtailor reads.
_FRAMES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    PREFILL: (utils.__name__, "GenerationMixin", ("input_ids", "model_kwargs", "generation_config")),
    ASSISTED_LOOP: (utils.__name__, "GenerationMixin", ("input_ids", "model_kwargs")),
    PREPARE: ("transformers.models.phi3.modeling_phi3", "Phi3ForCausalLM", ("input_ids", "kwargs")),
    "forward": ("transformers.models.llama.modeling_llama", "LlamaModel", ("input_ids",)),
    POSITIONS_IN_GENERATE: (utils.__name__, "GenerationMixin", ("inputs_tensor", "model_kwargs")),
    POSITIONS_IN_FORWARD: (
        "transformers.models.qwen2_vl.modeling_qwen2_vl",
        "Qwen2VLModel",
        ("inputs_embeds", "mm_token_type_ids"),
    ),
}
# What transformers asks of each layer of a cache. Another name would be a question that our layers do not answer.
_ASKED_OF_LAYERS = frozenset({"lazy_initialization", "update", "get_mask_sizes", "get_seq_length"})
# Of a chat template's text: which names it reads.
_VARIABLES = "_get_template_variables"
_LENGTHS = frozenset({"get_max_length", "get_max_cache_shape"})


def hand_cache(cache: Any) -> dict[str, Any]:
    """Return a cache as the keyword argument of a model or its `generate`: `model(ids, **hand_cache(cache))`."""
    return {CACHE_ARGUMENT: cache}


def find_cache(given: Mapping[str, Any]) -> Any:
    """Return the cache among keyword arguments, by whichever name it was given; None where there is none.

    Raises:
        CacheMisuse: it was given by both names.
    """
    names = [name for name in CACHE_ARGUMENTS if given.get(name) is not None]
    if len(names) > 1:
        raise CacheMisuse(
            f"a cache was given as {names[0]} and as {names[1]}, which are two names of one argument: give one of them"
        )
    return given[names[0]] if names else None


def rename_cache(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same keyword arguments, the cache under the name that this transformers takes.

    Raises:
        CacheMisuse: see `find_cache`.
    """
    cache = find_cache(given)
    rest = {name: value for name, value in given.items() if name not in CACHE_ARGUMENTS}
    return rest if cache is None else {**rest, CACHE_ARGUMENT: cache}


def read_cache(output: Any) -> Any:
    """Return the cache in the output of a model or of `generate`; None where there is none."""
    return getattr(output, CACHE_ARGUMENT, None)


def template_variables(template: str) -> frozenset[str] | None:
    """Return the names that a chat template reads; None where this transformers does not tell.

    Args:
        template: Jinja text. One that is no Jinja reads nothing that could be told, and fails where it is used.
    """
    found: Callable[[str], frozenset[str]] | None = getattr(chat_template_utils, _VARIABLES, None)
    try:
        return None if found is None else found(template)
    # Jinja's own errors: kvtailor has it through transformers, and may be without it.
    except Exception:
        return None


def broken_assumptions() -> list[str]:
    """Return what of transformers is not as kvtailor reads it, a sentence each; none where all is as it was."""
    found = []
    for function, (module, owner, names) in _FRAMES.items():
        code = _code_of(module, owner, function)
        if code is None:
            found.append(f"{module}.{owner} has no function {function}, whose frame is read")
            continue
        missing = [name for name in names if name not in code.co_varnames]
        if missing:
            found.append(f"{owner}.{function} of {module} has no {', '.join(missing)}, which is read from its frame")
    if not hasattr(chat_template_utils, _VARIABLES):
        found.append(f"{chat_template_utils.__name__} has no {_VARIABLES}, which tells what a chat template reads")
    asked: frozenset[str] = getattr(CacheLayerMixin, "__abstractmethods__", frozenset())
    for name in sorted(_ASKED_OF_LAYERS - asked):
        found.append(f"layers of a cache need no {name} any more")
    for name in sorted(asked - _ASKED_OF_LAYERS - _LENGTHS):
        found.append(f"layers of a cache need {name}, which is new")
    generate = inspect.signature(utils.GenerationMixin.generate).parameters
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in generate.values()):
        found.append("generate takes no further keyword arguments, among which it got its cache")
    if FED not in inspect.signature(getattr(utils.GenerationMixin, PREPARE)).parameters:
        found.append(f"{PREPARE} takes no {FED}, by which a text is fed anew")
    if not hasattr(GenerationConfig(), "max_length"):
        found.append("a generation config has no max_length, from which the longest text is read")
    return found


def _code_of(module: str, owner: str, function: str) -> CodeType | None:
    found: Callable[..., Any] | None = getattr(getattr(import_module(module), owner, None), function, None)
    return None if found is None else inspect.unwrap(found).__code__
