"""What kvtailor needs of a model, read from its configuration; and what it refuses, each in a sentence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kvtailor.errors import UnsupportedModel
from kvtailor.hf.model.layer_shapes import LayerShape, has_indexer, layer_config, layer_shapes, unknown_kinds
from kvtailor.hf.model.modules import attending_by_source
from kvtailor.hf.model.probe import Attending, probed

__all__ = ["Geometry", "check", "refusal"]

# Families by name: for what a configuration alone is asked (`kvtailor check`), and for what no tiny forward shows.
# `tests/seam/model/test_probe.py` tells which entry no class of the installed transformers needs any more.
# Their attention changes keys or values between the cache and the attention function: the hand-over would be lost.
_CHANGES_STATES = frozenset({"diffllama", "jetmoe"})
# Their recurrent layers read the state where one token comes alone, and begin with zeros where several do.
_RESTARTS = frozenset({"jamba", "zamba"})
# The state of such a model lies in its modules, whatever cache it is given: two texts on one model would share it.
_STATES_IN_MODULES = frozenset({"recurrent_gemma"})
_ADDS_TO_LOGITS = frozenset({"inkling_text", "inkling2_text"})
_BY_BLOCKS = frozenset({"diffusion_gemma_text"})
_MASKS_BY_STATES = frozenset({"doge"})


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Shapes of a model's cache.

    Attributes:
        shapes: what each layer of the cache keeps.
        max_positions: the positions the model was made for; None if its configuration has no such number.
        model_type: transformers' name of the architecture.
        multiplies: the model computes its attention itself, in products that kvtailor follows. A configuration does not
            say it; see `check`.
    """

    shapes: tuple[LayerShape, ...]
    max_positions: int | None
    model_type: str
    multiplies: bool = False

    @classmethod
    def of(cls, config: Any) -> Geometry:
        """The geometry of a transformers configuration.

        Raises:
            UnsupportedModel: for what kvtailor does not support; the message has what and why.
        """
        sentence = refusal(config)
        if sentence is not None:
            raise UnsupportedModel(sentence)
        text = config.get_text_config(decoder=True)
        return cls(
            shapes=layer_shapes(text),
            max_positions=getattr(text, "max_position_embeddings", None),
            model_type=text.model_type,
        )

    @property
    def layers(self) -> int:
        """Layers of the cache, those that keep nothing of the text included."""
        return len(self.shapes)

    @cached_property
    def compressed(self) -> tuple[int, ...]:
        """The layers that keep keys and values of all tokens, which a plan compresses."""
        return tuple(index for index, shape in enumerate(self.shapes) if shape.compressed)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer the model's own sliding window in tokens, None where it has none."""
        return tuple(shape.window for shape in self.shapes)

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """Of each compressed layer whose keys other layers attend to, those layers."""
        found: dict[int, tuple[int, ...]] = {}
        for index, shape in enumerate(self.shapes):
            if shape.reads in self.compressed and shape.reads is not None:
                found[shape.reads] = (*found.get(shape.reads, ()), index)
        return found

    @property
    def restarts(self) -> bool:
        """Whether transformers' code for these states forgets them where several tokens come after others."""
        return self.model_type in _RESTARTS and self.has_states

    @property
    def has_states(self) -> bool:
        """Whether layers keep linear-attention or convolution states."""
        return any(shape.states for shape in self.shapes)

    def taking_back_refusal(self) -> str | None:
        """Why the newest tokens of such a model cannot be taken back, as a clause; None where they can."""
        if any(shape.states and not shape.convolution for shape in self.shapes):
            return f"layers of this {self.model_type} keep recurrent states, out of which no token can be taken"
        if self.readers:
            return f"layers of this {self.model_type} read the keys of others, which kvtailor cannot take back yet"
        return None

    @property
    def has_latents(self) -> bool:
        """Whether compressed layers keep latents (multi-head latent attention)."""
        return any(shape.latents for shape in self.compressed_shapes)

    @property
    def compressed_shapes(self) -> tuple[LayerShape, ...]:
        """The shapes of the compressed layers."""
        return tuple(self.shapes[index] for index in self.compressed)

    @property
    def alike(self) -> bool:
        """Whether all compressed layers have the same heads and sizes."""
        return len({(s.q_heads, s.kv_heads, s.key_size, s.value_size) for s in self.compressed_shapes}) < 2

    @property
    def first(self) -> LayerShape:
        """The shape of the first compressed layer; where none is compressed, of the first that keeps keys at all."""
        keeping = [shape for shape in self.shapes if shape.kv_heads]
        return next((shape for shape in keeping if shape.compressed), keeping[0])

    @property
    def q_heads(self) -> int:
        """Query heads of the first compressed layer, and of all where they are `alike`."""
        return self.first.q_heads

    @property
    def kv_heads(self) -> int:
        """Kv heads of the first compressed layer, and of all where they are `alike`."""
        return self.first.kv_heads

    @property
    def head_dim(self) -> int:
        """Size of a key of the first compressed layer, and of all where they are `alike`."""
        return self.first.key_size

    def of_rank(self, ranks: int) -> Geometry:
        """Return the geometry of one process where so many share the heads of each layer evenly."""
        if ranks == 1:
            return self
        own = (replace(s, q_heads=s.q_heads // ranks, kv_heads=s.kv_heads // ranks) for s in self.shapes)
        return replace(self, shapes=tuple(own))

    def other_bytes(self, element_size: int, own_size: int | None = None) -> int:
        """Bytes of one row that layers hold which no plan compresses: the model's own windows, once full, and states.

        Args:
            element_size: bytes of an element of the cache's dtype.
            own_size: the same of the model's, in which these layers are; None: it is the cache's.

        Raises:
            UnsupportedModel: the size of a layer's states is not known before they are there.
        """
        windows = sum(
            (shape.window - 1) * shape.token_elements for shape in self.shapes if shape.kv_heads and shape.window
        )
        own = element_size if own_size is None else own_size
        states = self.state_bytes(own)
        if states is None:
            raise UnsupportedModel(
                f"how many bytes the recurrent states of this {self.model_type} take is not known before they are "
                "there, so kvtailor cannot keep them within bytes=: give the budget as tokens= or keep="
            )
        return windows * own + states

    def state_bytes(self, element_size: int) -> int | None:
        """Bytes of the states of one row; None where their sizes are not known from the configuration."""
        sizes = [shape.states_bytes(element_size) for shape in self.shapes if shape.states]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def full_bytes(self, rows: int, seen: int, element_size: int, own_size: int | None = None) -> int:
        """Bytes of keys and values of `seen` tokens of `rows` rows without compression; no states.

        `own_size` is of the layers that no plan compresses, see `other_bytes`.
        """
        own = element_size if own_size is None else own_size
        elements = ((shape, shape.slots(seen) * shape.token_elements) for shape in self.shapes)
        return rows * sum(count * (element_size if shape.compressed else own) for shape, count in elements)


def refusal(config: Any) -> str | None:
    """Why a model of this configuration is refused, as a sentence; None where it is supported."""
    name = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        return f"{name} is an encoder-decoder model; kvtailor compresses the cache of decoder-only models"
    text = config.get_text_config(decoder=True)
    # Where layers differ, the configuration of all refuses to be asked for what is one layer's.
    layers = getattr(text, "num_hidden_layers", None)
    if not layers or getattr(layer_config(text, 0), "num_attention_heads", None) is None:
        return (
            f"{name} does not say in its configuration how many layers and attention heads its decoder has: it is "
            "recurrent, or made of several transformers, and kvtailor supports neither"
        )
    if (getattr(text, "num_kv_shared_layers", 0) or 0) >= layers:
        return (
            f"{name} keeps no keys of its own: all its layers read those of the model for which it drafts, so there is "
            "nothing to compress"
        )
    return _refusal_of_cache(name, text) or _refusal_of_attention(name, text)


def _refusal_of_cache(name: str, text: Any) -> str | None:
    """Why what a decoder caches is not supported, as a sentence; None where it is."""
    if has_indexer(text):
        return (
            f"{name} lets an indexer choose the tokens that each query sees (sparse attention), by keys of its own "
            "that it caches beside the others; kvtailor does not support that"
        )
    unknown = unknown_kinds(text)
    if unknown:
        return (
            f"{name} has layers of kind {', '.join(unknown)}; kvtailor supports layers of full, sliding-window, "
            "chunked and linear attention"
        )
    if not any(shape.kv_heads for shape in layer_shapes(text)):
        return (
            f"{name} keeps no keys and values, only states of constant size (recurrent, convolutional), so its cache "
            "does not grow with the text and there is nothing to compress"
        )
    if text.model_type in _STATES_IN_MODULES:
        return (
            f"{name} keeps its recurrent states in the model's modules and not in the cache, so a cache of its own "
            "does not keep one text apart from another; kvtailor does not support that"
        )
    return None


def _refusal_of_attention(name: str, text: Any) -> str | None:
    """Why a decoder's attention is not supported, as a sentence; None where it is."""
    if text.model_type == "falcon" and text.alibi:
        return (
            f"this {name} adds a number to each attention logit by its position (alibi=True) in code of its own, which "
            "kvtailor does not support; it supports the Falcon models with a rotary embedding (alibi=False)"
        )
    if name in _CHANGES_STATES or text.model_type in _CHANGES_STATES:
        return f"{name} changes keys or values between cache and attention; kvtailor does not support that"
    if text.model_type in _MASKS_BY_STATES:
        return (
            f"{name} makes an attention mask of its own from the values of all tokens at each step, so none of them "
            "may be evicted; kvtailor does not support that"
        )
    if getattr(text, "cross_attention_layers", None):
        return (
            f"{name} has cross-attention layers ({', '.join(map(str, text.cross_attention_layers))}) in its decoder; "
            "kvtailor supports self-attention only"
        )
    if text.model_type in _ADDS_TO_LOGITS:
        return (
            f"{name} gives its attention numbers that are added to each logit, or sinks that differ from token to "
            "token; kvtailor supports one sink for each query head, and nothing that is added"
        )
    if text.model_type in _BY_BLOCKS:
        return (
            f"{name} denoises whole blocks of tokens, which see each other in both directions, and does not decode "
            "token by token; kvtailor supports causal decoding"
        )
    if getattr(text, "is_causal", True) is False:
        return f"{name} is configured for bidirectional attention; a KV cache needs causal attention"
    if getattr(text, "add_cross_attention", False):
        return f"{name} is configured with cross-attention layers; kvtailor supports self-attention only"
    return None


def check(model: Any, own_name: str) -> Attending:
    """Raise `UnsupportedModel` for a model that cannot use kvtailor's cache as it was loaded.

    Args:
        model: a transformers causal language model.
        own_name: the name under which kvtailor's attention is registered.

    Returns:
        What its attention does with a cache.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise UnsupportedModel(f"expected a transformers causal language model, and got a {type(model).__name__}")
    name = config.model_type
    sentence = refusal(config)
    if sentence is not None:
        raise UnsupportedModel(sentence)
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise UnsupportedModel(
            f"this {name} is wrapped by a PEFT adapter that puts learned tokens or keys before each prompt "
            f"({type(adapter).__name__}), which kvtailor's cache would not count; kvtailor supports adapters of weights"
        )
    text = config.get_text_config(decoder=True)
    # Some prefixes are read in both directions by a decoder; an encoder declares it itself.
    if getattr(text, "is_decoder", None) is False:
        causal = {
            getattr(module, "is_causal", True)
            for module in model.modules()
            if getattr(module, "config", None) is text and isinstance(getattr(module, "layer_idx", None), int)
        }
        # A decoder's cross-attention is not causal either, beside its self-attention that is.
        if causal == {False}:
            raise UnsupportedModel(
                f"{name} is configured as an encoder (is_decoder=False), so its attention is not causal, and a KV "
                "cache needs causal attention; set is_decoder=True in its configuration if it is a decoder"
            )
    asked = text._attn_implementation
    if asked not in (None, "sdpa", "eager", own_name):
        raise UnsupportedModel(
            f"this model was loaded with attn_implementation={asked!r}, and kvtailor's cache comes with an attention "
            "of its own; load the model without attn_implementation, or call model.set_attn_implementation('sdpa') "
            "first"
        )
    # By the source only where the model's code does not run without numbers.
    attending = probed(model) or attending_by_source(model)
    _check_attending(type(model).__name__, name, attending)
    return attending


def _check_attending(kind: str, name: str, attending: Attending) -> None:
    """Raise where the attention of a class of models cannot use a cache of ours."""
    if not attending.hands_over:
        raise UnsupportedModel(
            f"no attention of {kind} hands its keys and values to a cache of transformers, so there is nothing that "
            "kvtailor could compress"
        )
    if attending.refusal is not None:
        raise UnsupportedModel(f"{name} {attending.refusal}")
    if attending.itself and not attending.multiplies:
        raise UnsupportedModel(
            f"{kind} computes its attention itself ({', '.join(attending.itself)}) and does not ask transformers' "
            "AttentionInterface for it, so kvtailor's attention cannot take its place"
        )
