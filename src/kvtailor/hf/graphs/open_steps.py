"""Replayed steps behind plain forwards: when one begins, goes on, and is landed.

A plain forward of a decoded token is answered by a replayed step (`Replay`), of which the cache itself knows nothing
until the steps *land*. So whatever else reads or changes the cache lands them first (`replayed_cache`), and whatever
this module does not understand is a plain forward, counted with its reason. Whether a forward was asked for a plain
decoded token is read from its arguments.

A recorded step holds the addresses of weights and what Python did at the time: which modules ran, in which mode, with
which hooks. So before each replay these are compared, by identity; no number of a device is read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all
from transformers.utils import ModelOutput

from kvtailor.engine import rollback
from kvtailor.engine.phase import Compressing
from kvtailor.hf.attention import NAME
from kvtailor.hf.graphs.counts import ReplayCounts
from kvtailor.hf.graphs.obstacles import obstacle_of_parts
from kvtailor.hf.graphs.replay import Recorder, Replay
from kvtailor.hf.progress import Alone
from kvtailor.hf.versions import CACHE_ARGUMENT, CACHE_ARGUMENTS, hand_cache
from kvtailor.types.late_checks import read_flag

__all__ = ["DecodedToken", "MarksOfModel", "OpenSteps", "autocast_modes", "decoded_token", "has_hooks"]

# The first step of a recording is run as it is, and recording takes about as long as another: fewer steps gain nothing.
_WORTH_RECORDING = 3
_OF_LOGITS = {"logits", CACHE_ARGUMENT}


class OpenSteps:
    """The replayed steps of one cache, which does not know of them until `land`.

    It refers to no cache, so that a cache that is dropped is freed at once.

    Args:
        record: makes of a step what is replayed; None: nothing is replayed yet.

    Attributes:
        record: see above.
        now: the steps that have not landed; None where the cache knows of all tokens.
        most: columns that `generate()` will have read when it ends, at most: slots are reserved for no more. None: it
            is not known.
    """

    def __init__(self, record: Recorder | None = None):
        self.record = record
        self.now: Replay | None = None
        self.most: int | None = None
        self._marks: MarksOfModel | None = None
        self._alone = Alone()
        # In the midst of a step: what it would have told is not there yet.
        self._stepping = False
        self._skip: str | None = None
        self._output: type[Any] | None = None
        self._replayed = self._recordings = 0
        self._reasons: dict[str, int] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenSteps:
        """The steps of a copied cache, which knows of all tokens."""
        assert self.now is None, "a cache is copied once its steps have landed"
        other = OpenSteps(self.record)
        other.most, other._skip, other._output = self.most, self._skip, self._output
        other._alone = Alone(self._alone.refusal)
        other._replayed, other._recordings, other._reasons = self._replayed, self._recordings, dict(self._reasons)
        return other

    @property
    def done(self) -> int:
        """Tokens of which the cache does not know yet."""
        return 0 if self.now is None else self.now.done

    @property
    def counts(self) -> ReplayCounts:
        """How many forwards were replayed, and why the others were not."""
        return ReplayCounts(
            replayed=self._replayed,
            recordings=self._recordings,
            plain=sum(self._reasons.values()),
            reasons=dict(self._reasons),
        )

    def forward(self, cache: Any, model: Any, plain: Callable[..., Any], args: tuple[Any, ...], given: Any) -> Any:
        """Answer a call of a model with a cache: by a replayed step where that is the same, else by `plain`.

        Args:
            cache: whose steps these are.
            model: that is called.
            plain: its own forward.
            args: of the call, by position.
            given: of the call, by name.
        """
        asked = decoded_token(args, given, model.device)
        if isinstance(asked, DecodedToken):
            with self._alone:
                reason = self._going_on(model, asked) or self._beginning(cache, model, asked)
                if reason is None:
                    cache._conversation.note(asked.tokens, at=cache.seen)
                    return self._output_of(cache, self._step(asked))
        else:
            reason = asked
        self.land()
        self._skip = None
        output = plain(*args, **given)
        self.ran_plainly(reason)
        self._output = _kind_of(output)
        return output

    def land(self, *, looked_at: bool = False) -> None:
        """Tell the cache of the tokens that have come, and let its plan act.

        Args:
            looked_at: another use of the cache is the reason. Where there is one at every token, nothing is gained by
                recording; so the next token comes plainly.

        Raises:
            CacheMisuse: another thread is in the midst of a step, or was; or taking the tokens was broken off.
        """
        if self.now is None and self._alone.refusal is None:
            return
        with self._alone:
            self._land(looked_at=looked_at)

    def drop(self) -> None:
        """Forget the steps of a cache that forgets everything."""
        now, self.now, self._marks = self.now, None, None
        self._alone, self._stepping, self._skip = Alone(), False, None
        if now is not None:
            now.drop()

    def ran_plainly(self, reason: str) -> None:
        """Count a forward that was not replayed, for a reason in words."""
        self._reasons[reason] = self._reasons.get(reason, 0) + 1

    def rows_changed(self) -> None:
        """Take note that the rows were put in another order, as beam search does between any two tokens."""
        self._skip = "rows were put in another order since the token before (beam search)"

    def _land(self, *, looked_at: bool = False) -> None:
        now = self.now
        if now is None:
            return
        if looked_at and now.left and now.done < _WORTH_RECORDING:
            self._skip = f"the cache was looked at before {_WORTH_RECORDING} steps had come"
        try:
            if not now.landed:
                now.land()
        finally:
            # Once landing has begun, the guard of the cache answers for what an error or an interrupt leaves.
            if now.landed:
                self.now = self._marks = None
                self._stepping = False

    def _step(self, asked: DecodedToken) -> Tensor:
        """Logits (b, 1, v) of a token that can be replayed."""
        assert self.now is not None
        recorded, self._stepping = self.now.recorded, True
        logits = self.now.step(asked.tokens, asked.positions)
        self._stepping = False
        self._replayed += 1
        self._recordings += self.now.recorded and not recorded
        return logits[:, None]

    def _output_of(self, cache: Any, logits: Tensor) -> Any:
        assert self._output is not None
        return self._output(logits=logits, **hand_cache(cache))

    def _going_on(self, model: Any, asked: DecodedToken) -> str | None:
        """Land the open steps if this token is none of them. Why it is certainly plain, in words, or None."""
        now = self.now
        if now is None:
            return None
        assert self._marks is not None
        # A step that was broken off left only what lies in free slots, and counts for none.
        goes_on = now.left and now.model is model and not self._stepping
        if not goes_on or not self._marks.hold() or _mode(model) is not None:
            self._land()
            return None
        if asked.tokens.shape[0] != now.rows or not _continues(asked, now.padding(now.columns), now.columns):
            self._land()
            return "attention_mask or rows were not those of the token before"
        return None

    def _beginning(self, cache: Any, model: Any, asked: DecodedToken) -> str | None:
        """Begin steps with this token where none are open. Why it is plain, in words, or None."""
        if self.now is not None:
            return None
        reason = self._skip or _mode(model) or _of_cache(cache, model, asked)
        if reason is None and self._output is None:
            reason = "no output of logits alone had come before"
        if reason is not None or self.record is None:
            return reason or "nothing records here"
        if has_hooks(model):
            return "the model has hooks, which would not run"
        if (obstacle := obstacle_of_parts(model)) is not None:
            return obstacle
        seen, real = cache.seen, _padding_of(cache)
        padding = None if real is None else torch.nn.functional.pad(real, (0, 1), value=True)
        if not _continues(asked, padding, seen + 1):
            return "attention_mask was not that of the tokens before, with one more"
        left = None if self.most is None or self.most <= seen else self.most - seen
        if left is not None and left < _WORTH_RECORDING:
            return f"fewer than {_WORTH_RECORDING} tokens were left"
        self._marks = MarksOfModel(model)
        # Last: from here on the cache is in a phase that only these steps can end.
        self.now = Replay(model, cache, real, sys.maxsize if left is None else left, self.record)
        return None


def _continues(asked: DecodedToken, padding: Tensor | None, columns: int) -> bool:
    """Whether the mask of a call hides the padding (b, columns) bool that is known, None for no padding, and no more.

    The host waits once for a device, and not where there is neither a mask nor padding, as a plain forward does.
    """
    mask = asked.mask
    if mask is None:
        return padding is None
    if mask.shape != (asked.tokens.shape[0], columns):
        return False
    shows = mask.to(torch.bool)
    return read_flag(shows.all() if padding is None else (shows == padding.to(shows.device)).all())


def _mode(model: Any) -> str | None:
    """In which mode nothing is replayed, in words; None: in none of them."""
    if torch.is_grad_enabled():
        return "gradients were not switched off"
    if model.training:
        return "the model was in training mode"
    if any(autocast_modes()):
        return "autocast was on"
    if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
        return "the model's attention was not kvtailor's"
    return None


def _of_cache(cache: Any, model: Any, asked: DecodedToken) -> str | None:
    """Why steps cannot begin on what a cache holds now, in words; None where they can."""
    guard, engine = cache.guard, cache.engine
    if guard.model is None or guard.model() is not model:
        return "another model called than that of the cache"
    # What a plain forward would raise, in the same words.
    guard.check_settled()
    guard.check_opened()
    if not cache.seen:
        return "no token had come before"
    if asked.tokens.shape[0] != engine.states[0].rows:
        return "other rows came than the cache holds"
    if guard.observers:
        return "something observed what comes to the layers"
    if engine.phase.windows_record and len(cache.geometry.compressed) < cache.geometry.layers:
        return "windows of the model's own recorded for a crop"
    if not isinstance(engine.phase, Compressing) or any(state.pending is not None for state in engine.states):
        return f"this cache {engine.phase.meaning}"
    if (real := _padding_of(cache)) is not None and real.shape[1] != cache.seen:
        return "the padding of some tokens was not known"
    if any(state.stored.tail is None or not state.stored.tail.length for state in engine.states):
        return "the tail of a layer was empty"
    until_action = rollback.tokens_until_action(engine)
    if until_action is not None and until_action < _WORTH_RECORDING:
        return f"the plan acts again within {_WORTH_RECORDING - 1} tokens"
    return None


def _padding_of(cache: Any) -> Tensor | None:
    """(b, columns) bool of what the cache has seen, False for padding; None: nothing is. The host waits for it."""
    real: Tensor | None = cache.guard.real
    return None if real is None or bool(real.all()) else real


def _kind_of(output: Any) -> type[Any] | None:
    """The class of a model's output that holds logits and a cache alone; None where it holds more, or is a tuple."""
    if not isinstance(output, ModelOutput) or {name for name, each in output.items() if each is not None} != _OF_LOGITS:
        return None
    return type(output)


_TENSORS = ("input_ids", "attention_mask", "position_ids")
# A value with which each of these changes nothing about the logits of one token.
_WITHOUT_EFFECT: Mapping[str, Sequence[object]] = {
    "use_cache": (None, True),
    "return_dict": (None, True),
    "logits_to_keep": (0, 1),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}


@dataclass(frozen=True, kw_only=True)
class DecodedToken:
    """One new token of each row.

    Attributes:
        tokens: (b, 1) int64.
        positions: (b or 1, 1) at which they stand.
        mask: (b, columns) of all that was seen and these tokens, 0 for padding; None: nothing is padding.
    """

    tokens: Tensor
    positions: Tensor
    mask: Tensor | None


def decoded_token(args: Sequence[Any], given: Mapping[str, Any], device: torch.device) -> DecodedToken | str:
    """Return the decoded token for which a model was called, or why the call is none, in words.

    Nothing on the device is read. Whatever is not known here is a reason: the list of what is known is closed.

    Args:
        args: of the call, by position.
        given: of the call, by name.
        device: of the model.
    """
    if args:
        return "arguments came by position"
    for name, value in given.items():
        if name in _TENSORS or name in CACHE_ARGUMENTS:
            continue
        allowed = _WITHOUT_EFFECT.get(name, (None,))
        # By type as well: 1 equals True, and a tensor equals nothing that could be looked at without a wait.
        if not any(type(value) is type(each) and value == each for each in allowed):
            return f"{name} was given" if value is not None else f"{name} was None"
    tokens, mask, positions = (given.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:
        return "there were no input_ids (b, t)"
    if tokens.shape[1] != 1:
        return "a prompt, a turn or a draft of several tokens"
    if not isinstance(positions, Tensor):
        return "there were no position_ids"
    if positions.ndim != 2 or positions.shape[0] not in (1, tokens.shape[0]) or positions.shape[1] != 1:
        return "position_ids were not (b, 1)"
    if tokens.is_floating_point() or positions.is_floating_point():
        return "input_ids or position_ids were no integers"
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        return "attention_mask was not (b, columns)"
    if any(each is not None and each.device != device for each in (tokens, mask, positions)):
        return "input lay on another device than the model"
    return DecodedToken(tokens=tokens, positions=positions, mask=mask)


_PARTS = ("_modules", "_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OWN_ADDRESS = (Tensor, nn.Parameter, nn.Buffer)


class MarksOfModel:
    """What a recorded step takes for granted of a model.

    Args:
        model: a module, now.
    """

    def __init__(self, model: nn.Module):
        modules = list(model.modules())
        self._hooks = [getattr(module, name) for module in modules for name in _HOOKS]
        self._dicts = [getattr(module, name) for module in modules for name in _PARTS]
        self._names = [(names, name) for names in self._dicts for name in names]
        # A part whose forward is replaced, by a kernel or by a hook of accelerate.
        self._names += [(vars(module), "forward") for module in modules]
        self._sizes = [len(names) for names in self._dicts]
        self._found = [names.get(name) for names, name in self._names]
        # Tensors of other classes, as quantised weights are, have no address of their own, and are replaced whole.
        self._tensors = [each for each in self._found if type(each) in _OWN_ADDRESS]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._modules = modules
        self._modes = self._modes_now()

    def hold(self) -> bool:
        """Whether the model is as it was, and runs in the same modes."""
        return (
            not any(self._hooks)
            and not has_hooks_of_all()
            and [len(names) for names in self._dicts] == self._sizes
            and all(names.get(name) is found for (names, name), found in zip(self._names, self._found, strict=True))
            and [tensor.data_ptr() for tensor in self._tensors] == self._addresses
            and self._modes_now() == self._modes
        )

    def _modes_now(self) -> tuple[object, ...]:
        return [module.training for module in self._modules], autocast_modes(), torch.is_inference_mode_enabled()


def has_hooks(model: nn.Module) -> bool:
    """Whether hooks of forwards are registered on a model or a part of it, or on all modules."""
    return has_hooks_of_all() or any(getattr(module, name) for module in model.modules() for name in _HOOKS)


def has_hooks_of_all() -> bool:
    """Whether hooks of forwards are registered on all modules."""
    return bool(hooks_of_all._global_forward_hooks or hooks_of_all._global_forward_pre_hooks)


def autocast_modes() -> tuple[bool, ...]:
    """Whether autocast is on, for the CPU and for CUDA."""
    return tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
