"""What a model's attention does with a cache, asked of the model's own code by two tiny forwards.

They run on a copy that is built from the configuration on torch's meta device: it has no numbers, so it costs neither
memory nor arithmetic, and the user's model, with its hooks, its places and its state, is not touched. A cache that
notes what comes to it takes the place of ours, and an attention that computes nothing the place of the model's.

A copy cannot run where the model's code looks at numbers. What was seen until then counts; where nothing was, `probed`
says so, and the words of the source are what is left (`hf.model.modules`).
"""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache
from transformers.utils import logging

from kvtailor.errors import UnsupportedModel
from kvtailor.hf.callers import calling_module
from kvtailor.hf.layers.products import operands
from kvtailor.hf.mask import LazyMask, lazy_mask
from kvtailor.hf.model.attending.softmax import softmax_of
from kvtailor.hf.model.layer_shapes import layer_shapes
from kvtailor.hf.versions import CACHE_ARGUMENT, CACHE_ARGUMENTS

__all__ = ["Attending", "probed"]

_NAME = "kvtailor-probe"
_HANDLE = "_kvtailor_probe"
_PROMPT = 2
# Answers by class and configuration; a process sees few of them.
_MOST_KNOWN = 256


@dataclass(frozen=True)
class Attending:
    """What was seen of a model's attention.

    Attributes:
        hands_over: keys and values come to the cache.
        itself: the classes that compute their attention themselves, instead of asking transformers' interface.
        multiplies: they do so in products that `hf.layers.products` follows.
        refusal: why kvtailor cannot serve the model, a clause whose subject is the model; None where nothing was seen
            that speaks against it.
    """

    hands_over: bool = True
    itself: tuple[str, ...] = ()
    multiplies: bool = False
    refusal: str | None = None


@dataclass
class _Notes:
    """What comes to the cache and to the attention in the forwards of one copy.

    Attributes:
        text: the decoder's configuration.
        following: the cache gives operands, to see whether the model's own products can be followed.
        updates: how often keys came.
        awaiting: the layer whose keys came and whose attention did not.
        asks: whether the attention has asked the interface.
        followed: how many attentions of products were understood.
        masked: a mask was made in this forward.
        itself: classes that computed their attention themselves, in their order.
        refusal: the first that was found.
    """

    text: Any
    following: bool
    updates: int = 0
    awaiting: int | None = None
    updating: str = ""
    asks: bool = False
    followed: int = 0
    masked: bool = False
    itself: dict[str, None] = field(default_factory=dict)
    refusal: str | None = None

    def __post_init__(self) -> None:
        self.shapes = layer_shapes(self.text)

    def updated(self, layer: int) -> None:
        self.settle()
        self.updates += 1
        self.awaiting, self.updating = layer, calling_module()

    def settle(self) -> None:
        """The attention of the layer whose keys came last never asked the interface."""
        if self.awaiting is not None and not self.following:
            self.itself[self.updating] = None
        self.awaiting = None

    def refuse(self, sentence: str) -> None:
        self.refusal = self.refusal or sentence

    def attended(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, given: dict[str, Any]
    ) -> None:
        """The attention of a module came."""
        handle, awaited = getattr(key, _HANDLE, None), self.awaiting
        name, index = type(module).__name__, getattr(module, "layer_idx", None)
        if handle is None and getattr(module, "config", None) is not self.text:
            return
        if handle is None and awaited is None:
            if key.shape[2] > query.shape[2]:
                self.refuse(
                    f"lets {name} read what a layer of the cache holds without handing it new keys; kvtailor's layers "
                    "hold no keys that a model could read"
                )
            return
        layer = awaited if handle is None else handle
        shape = self.shapes[layer] if layer is not None and layer < len(self.shapes) else None
        expands = shape is not None and shape.latents and index == awaited
        if not expands and (handle is None or getattr(value, _HANDLE, None) != handle):
            self.refuse(f"changes keys or values between cache and attention ({name}); kvtailor does not support that")
        self.awaiting, self.asks = None, True
        try:
            softmax_of(module, query.shape[1], given, of_sdpa=shape is not None and shape.window is not None)
        except UnsupportedModel as error:
            self.refuse(f"cannot be served: {error}")
        misfit = _misfit(mask)
        if misfit is not None:
            self.refuse(misfit)
        if self.masked and isinstance(mask, Tensor):
            self.refuse(
                f"makes a mask of its own out of the one that transformers gives ({name}), and kvtailor's is a rule "
                "and no tensor; kvtailor does not support that"
            )


class _Current(threading.local):
    notes: _Notes | None = None


_current = _Current()
_known: dict[tuple[type, str], Attending | None] = {}


def probed(model: Any) -> Attending | None:
    """Return what the attention of a model does with a cache; None where its code does not run without numbers.

    The answer is that of its class and configuration, whatever the model has run before.

    Args:
        model: a transformers causal language model, or a wrapper around one.
    """
    inner = getattr(model.set_attn_implementation, "__self__", model)
    try:
        key = type(inner), str(inner.config.to_json_string(use_diff=False))
    except (TypeError, ValueError, AttributeError):
        return _probe(type(inner), inner.config)
    if key not in _known:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = _probe(*key[:1], inner.config)
    return _known[key]


def _probe(kind: type, config: Any) -> Attending | None:
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    with _quietly():
        try:
            shadow = _shadow(kind, config)
        except Exception:
            return None
        seen = _run(shadow, following=False)
        if seen is None:
            return None
        if seen.refusal is not None or not seen.updates:
            return Attending(hands_over=seen.updates > 0, refusal=seen.refusal)
        if not seen.itself:
            return Attending()
        followed = _run(shadow, following=True)
        follows = followed is not None and followed.refusal is None and followed.followed == followed.updates > 0
        return Attending(itself=tuple(seen.itself), multiplies=follows and not seen.asks)


def _shadow(kind: Any, config: Any) -> Any:
    """A model of the class and configuration that has no numbers."""
    own = copy.deepcopy(config)
    for each in _parts(own):
        each._attn_implementation = {"": "eager"}
    with torch.device("meta"), _uninitialised():
        # A product of experts on the meta device takes bfloat16 alone.
        shadow = kind._from_config(own, dtype=torch.bfloat16).eval()
    if shadow._can_set_attn_implementation():
        shadow.set_attn_implementation(_NAME)
    for each in _parts(shadow.config):
        each._attn_implementation = {"": _NAME}
    return shadow


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _parts(part)


def _run(shadow: Any, *, following: bool) -> _Notes | None:
    """What two forwards show; None where they show nothing.

    Whether a mask of ones is given decides in some families which of their code looks at numbers.
    """
    best: _Notes | None = None
    # With one first: generate() always gives it.
    for masked in (True, False):
        notes, whole = _forwards(shadow, following=following, masked=masked)
        if whole or notes.refusal is not None:
            return notes
        if notes.updates and (best is None or notes.updates > best.updates):
            best = notes
    return best


def _forwards(shadow: Any, *, following: bool, masked: bool) -> tuple[_Notes, bool]:
    """A prompt and a token. What was seen, and whether the first of them ran to its end."""
    text = shadow.config.get_text_config(decoder=True)
    notes = _Notes(text, following)
    whole = False
    _current.notes = notes
    try:
        cache = _noting(text)
        layers = len(notes.shapes)
        taken = inspect.signature(shadow.forward).parameters
        name = next((name for name in CACHE_ARGUMENTS if name in taken), CACHE_ARGUMENT)
        for new, columns in ((_PROMPT, _PROMPT), (1, _PROMPT + 1)):
            given: dict[str, Any] = {"input_ids": _ids(new), name: cache, "use_cache": True}
            if masked:
                given["attention_mask"] = _ids(columns)
            notes.masked = False
            with torch.no_grad(), _Constants() if following else nullcontext():
                shadow(**given)
            notes.settle()
            whole = True
            if len(cache.layers) > layers:
                notes.refuse(
                    f"puts layers of its own into the cache that it is given ({len(cache.layers)} for the {layers} of "
                    "its configuration), since it runs some layers several times; kvtailor does not support that"
                )
    except Exception:
        # Between its keys and its attention a layer that asks the interface has nothing to do with our mask.
        notes.settle()
    finally:
        _current.notes = None
    return notes, whole


def _ids(tokens: int) -> Tensor:
    return torch.empty((1, tokens), dtype=torch.int64, device="meta")


def _noting(text: Any) -> Any:
    """A cache as transformers makes it for a decoder, which notes what comes."""
    base: type[Cache] = DynamicCache
    options: dict[str, Any] = {"config": text}
    if text.model_type == "minimax":
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        base, options = MiniMaxCache, {}

    class Noting(base):
        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            notes = _current.notes
            if notes is None:
                return keys, values
            notes.updated(layer_idx)
            if notes.following:
                return operands(_Followed(notes, keys, values), keys, values)
            # The tensors themselves are what the layer keeps.
            keys, values = keys.view(keys.shape), values.view(values.shape)
            for each in (keys, values):
                setattr(each, _HANDLE, layer_idx)
            return keys, values

    return Noting(**options)


class _Constants(TorchFunctionMode):
    """What a model's code makes of its own numbers keeps them: products ask whether those are zeros, or the lowest."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if (
            func in (torch.tensor, torch.full, torch.zeros)
            and str(given.get("device")) == "meta"
            and _constant(func, args)
        ):
            given["device"] = "cpu"
        return func(*args, **given)


def _constant(make: Any, args: tuple[Any, ...]) -> bool:
    """Whether a factory makes one number, which may stand beside tensors of any device, or zeros that are added to."""
    if make is torch.zeros:
        return True
    return bool(args) and (isinstance(args[0], int | float) if make is torch.tensor else args[0] in ((), []))


class _Followed:
    """What stands for a layer of our cache where products are followed."""

    def __init__(self, notes: _Notes, keys: Tensor, values: Tensor):
        self._notes, self.arriving, self.model_dtype = notes, (keys, values), keys.dtype

    def attend_products(self, query: Tensor, mask: Any, scaling: float) -> Tensor:
        """Notes that an attention came to its end; nothing is computed."""
        if not isinstance(mask, LazyMask) or _misfit(mask) is not None:
            # Without `create_causal_mask` what it sees is not known.
            raise UnsupportedModel("its mask is its own")
        self._notes.followed += 1
        return query.new_empty((*query.shape[:3], self.arriving[1].shape[-1]))

    def refuse_forward(self) -> None:
        """Nothing is held."""


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *_: Any, **given: Any
) -> tuple[Tensor, None]:
    if _current.notes is not None:
        given = {name: each for name, each in given.items() if name not in ("scaling", "dropout")}
        _current.notes.attended(module, query, key, value, attention_mask, given)
    b, q, t, _size = query.shape
    return query.new_empty((b, t, q, value.shape[-1])), None


def _mask(*args: Any, attention_mask: Any = None, **kwargs: Any) -> LazyMask:
    # What is padding is a matter of numbers; how many columns it has is not.
    mask = lazy_mask(*args, **kwargs)
    mask.padding = attention_mask if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2 else None
    if _current.notes is not None:
        _current.notes.masked = True
    return mask


def _misfit(mask: Any) -> str | None:
    """What is wrong with the columns of a mask, a clause; None where it has one for each token."""
    if not isinstance(mask, LazyMask) or mask.padding is None:
        return None
    columns, tokens = mask.padding.shape[1], mask.first_column + mask.new_tokens
    if columns == tokens:
        return None
    return f"masks {columns} columns where a text has {tokens} tokens; kvtailor supports a column for each token"


def _uninitialised() -> Any:
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        return nullcontext()
    return no_init_weights()


@contextmanager
def _quietly() -> Iterator[None]:
    """What transformers says of a model it has said of the user's own; and no random number is drawn for a copy."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
