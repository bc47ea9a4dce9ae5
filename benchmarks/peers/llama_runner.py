"""llama.cpp through llama-cpp-python: a model from a GGUF file, and caches of it that are filled, fed and weighed.

What llama.cpp tells about itself is read from its own log: the bytes that it has allocated for a cache, whether it
rotates keys and values before they are quantised (it does by default since 2026, by a Hadamard matrix), and whether
flash attention is on. Bytes that are held come from what it saves of a sequence (`sequence_state`).

llama-cpp-python is no dependency of kvtailor. It is built by `pip install llama-cpp-python`, which takes a compiler and
some minutes; see docs/peers/llama-cpp.md.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from benchmarks.peers.ggml_rows import KINDS, RowKind, kind_of
from benchmarks.peers.gguf_file import interleaved
from benchmarks.peers.sequence_state import Rows, SequenceState
from kvtailor.errors import KvtailorError, UnknownName
from kvtailor.ops.codes.hadamard import mixed

__all__ = ["TYPES", "LlamaCache", "LlamaModel", "missing", "rotated_rows"]

TYPES: Mapping[str, int] = {kind.name: kind.number for kind in KINDS.values()} | {"q4_1": 3, "q5_0": 6, "q5_1": 7}
"""Numbers of the types that a cache may have; rows of those in `ggml_rows.KINDS` can be read here."""

_ROTATION_OFF = "LLAMA_ATTN_ROT_DISABLE"
_FIRST_ROTATION = 64
_BUFFER = re.compile(r"KV buffer size = +([0-9.]+) MiB")
_ROTATES = re.compile(r"attn_rot_([kv]) = (\d)")
_FLASH = re.compile(r"flash_attn += (\w+)")


def missing() -> str | None:
    """Return why llama.cpp cannot be called here; None: it can."""
    try:
        import llama_cpp  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        return f"llama-cpp-python cannot be imported ({error}): see docs/peers/llama-cpp.md"
    return None


def rotated_rows(states: Tensor, *, of_keys: bool) -> Tensor:
    """Return states (..., d) as llama.cpp turns them before it quantises: by an orthonormal Hadamard matrix.

    Keys are turned in blocks of the largest power of two times 64 that divides d, values in blocks of 64
    (`build_input_k_rot` and `build_input_v_rot` in `src/llama-kv-cache.cpp`).
    """
    size, block = states.shape[-1], _FIRST_ROTATION
    if size % block:
        raise KvtailorError(f"asked for llama.cpp's rotation of {size} channels: it rotates multiples of {block} alone")
    while of_keys and size % (2 * block) == 0:
        block *= 2
    # `mixed` divides by the block's size, and an orthonormal matrix by its root.
    turned: Tensor = mixed(states.float().unflatten(-1, (-1, block))) * block**0.5
    return turned.flatten(-2)


class _Log:
    """Collects the lines that llama.cpp logs, instead of standard error."""

    def __init__(self, llama_cpp: Any) -> None:
        self.lines: list[str] = []
        # Kept alive: C holds its address.
        self._callback = llama_cpp.llama_log_callback(lambda _, text, __: self.lines.append(text.decode()))
        llama_cpp.llama_log_set(self._callback, ctypes.c_void_p(0))

    def since(self, count: int) -> str:
        return "".join(self.lines[count:])


class LlamaModel:
    """A model of llama.cpp on the CPU.

    Attributes:
        api: the module `llama_cpp`.
        vocabulary: rows of its output.
        turns_neighbours: whether its rotary embedding turns channels 2i and 2i + 1, and not i and i + d/2.
        version: of llama-cpp-python.
    """

    _log: _Log | None = None

    def __init__(self, path: Path) -> None:
        """Load the model of a GGUF file.

        Raises:
            KvtailorError: llama.cpp is not installed, or cannot load the file, with what it logged.
        """
        reason = missing()
        if reason is not None:
            raise KvtailorError(reason)
        import llama_cpp

        self.api: Any = llama_cpp
        self.version = str(llama_cpp.__version__)
        if LlamaModel._log is None:
            LlamaModel._log = _Log(llama_cpp)
            llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        before = len(self.log.lines)
        self.pointer: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise KvtailorError(f"llama.cpp cannot load {path}: {self.log.since(before)}")
        self.vocabulary = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.pointer)))
        # A llama's neighbours, a qwen2's halves; transformers turns halves of both.
        self.turns_neighbours = llama_cpp.llama_model_rope_type(self.pointer) == llama_cpp.LLAMA_ROPE_TYPE_NORM

    @property
    def log(self) -> _Log:
        """What llama.cpp has logged in this process."""
        assert LlamaModel._log is not None
        return LlamaModel._log

    def system(self) -> str:
        """Return the instruction sets and libraries that llama.cpp uses, in its own words."""
        return str(self.api.llama_print_system_info().decode())


class LlamaCache:
    """A context of llama.cpp with a cache of one type, for one sequence.

    Attributes:
        name: of the type of its keys.
        seen: tokens that it holds.
        cells: tokens that it has room for.
        allocated_bytes: what llama.cpp logged that it has allocated for the cache: hundredths of a MiB.
        rotates: whether keys and values are rotated before they are quantised, by llama.cpp's log.
    """

    def __init__(
        self,
        model: LlamaModel,
        kind: str,
        cells: int,
        *,
        threads: int,
        values: str | None = None,
        batch: int = 512,
        rotation: bool = True,
        flash: bool = True,
    ) -> None:
        """Make an empty cache.

        Args:
            model: of the cache.
            kind: a name of `TYPES`, of keys and values.
            cells: tokens that it has room for; llama.cpp rounds up to 256.
            threads: of every step.
            values: a name of `TYPES`, of values; None: that of keys.
            batch: most tokens that are computed at once.
            rotation: False turns llama.cpp's rotation of quantised caches off.
            flash: False turns flash attention off, which rounds keys and values to float16 whatever the cache holds.

        Raises:
            UnknownName: there is no type of that name.
            KvtailorError: llama.cpp cannot make it, or logs something else than is read here, with what it logged.
        """
        for name in {kind, values or kind} - set(TYPES):
            raise UnknownName("type of ggml", name, TYPES)
        self.model, self.api, self.name, self.seen = model, model.api, kind, 0
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = cells, batch, batch, 1
        params.n_threads = params.n_threads_batch = threads
        params.type_k, params.type_v = TYPES[kind], TYPES[values or kind]
        params.flash_attn_type = int(flash)
        params.offload_kqv = params.op_offload = False
        params.no_perf = True
        before = len(model.log.lines)
        with _environment({_ROTATION_OFF: "0" if rotation else "1"}):
            self.pointer: Any = self.api.llama_init_from_model(model.pointer, params)
        said = model.log.since(before)
        if not self.pointer:
            raise KvtailorError(f"llama.cpp cannot make a cache of {cells} cells in {kind}: {said}")
        found, buffers, rotates = _FLASH.findall(said), _BUFFER.findall(said), dict(_ROTATES.findall(said))
        if found != ["enabled" if flash else "disabled"] or not buffers or len(set(rotates.values())) != 1:
            raise KvtailorError(
                f"llama.cpp's log has changed: expected 'flash_attn' as asked for ({flash}), 'KV buffer size', and "
                f"'attn_rot_k' and 'attn_rot_v' that are the same, found {said}"
            )
        self.allocated_bytes = int(sum(float(each) for each in buffers) * 2**20)
        self.rotates = "1" in rotates.values()
        self.cells = int(self.api.llama_n_ctx(self.pointer))
        # llama.cpp ends the process where more tokens are given at once than its own limit, the cache's room or less.
        self._most = min(batch, int(self.api.llama_n_batch(self.pointer)))
        self._batch = self.api.llama_batch_init(self._most, 0, 1)

    @property
    def kind(self) -> RowKind:
        """Its rows' form, where they are read here."""
        return kind_of(self.name)

    def close(self) -> None:
        """Free its memory."""
        self.api.llama_batch_free(self._batch)
        self.api.llama_free(self.pointer)
        self.pointer = None

    def clear(self) -> None:
        """Forget all tokens."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.pointer), True)
        self.seen = 0

    def use_threads(self, threads: int) -> None:
        """Compute the next steps with so many threads."""
        self.api.llama_set_n_threads(self.pointer, threads, threads)

    def feed(self, ids: Tensor, *, logits: str = "last") -> Tensor:
        """Compute tokens (n,) after what the cache holds.

        Args:
            ids: of the tokens.
            logits: "last" for those of the last token, "all" for those of every token.

        Returns:
            (1, V) or (n, V) float32.

        Raises:
            KvtailorError: the cache has no room for them, or llama.cpp refuses them.
        """
        if logits not in ("last", "all"):
            raise KvtailorError(f"asked for logits={logits!r}: give 'last' or 'all'")
        self._check_room(ids.numel())
        found = []
        for piece in ids.split(self._most):
            wanted = torch.zeros(piece.numel(), dtype=torch.bool)
            if logits == "all":
                wanted[:] = True
            wanted[-1] = True
            found.append(self._decode(piece.tolist(), wanted.tolist()))
        return torch.cat(found) if logits == "all" else found[-1]

    def step(self, token: int) -> None:
        """Decode one token, and wait for its logits; for timing."""
        self._check_room(1)
        batch = self._batch
        batch.n_tokens = 1
        batch.token[0], batch.pos[0], batch.n_seq_id[0], batch.seq_id[0][0] = token, self.seen, 1, 0
        batch.logits[0] = 1
        self._checked(self.api.llama_decode(self.pointer, batch), 1)
        self.api.llama_get_logits(self.pointer)

    def _decode(self, ids: Sequence[int], wanted: Sequence[bool]) -> Tensor:
        batch = self._batch
        batch.n_tokens = len(ids)
        for i, (token, want) in enumerate(zip(ids, wanted, strict=True)):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, self.seen + i, 1, 0
            batch.logits[i] = want
        self._checked(self.api.llama_decode(self.pointer, batch), len(ids))
        pointer = self.api.llama_get_logits(self.pointer)
        rows: Any = numpy.ctypeslib.as_array(pointer, shape=(sum(wanted), self.model.vocabulary))
        return torch.from_numpy(rows.copy())

    def _check_room(self, tokens: int) -> None:
        if tokens < 1 or self.seen + tokens > self.cells:
            raise KvtailorError(
                f"asked llama.cpp for {tokens} tokens after {self.seen}, but its cache has {self.cells} cells: give at "
                "least 1 token, and make a larger cache"
            )

    def _checked(self, code: int, tokens: int) -> None:
        if code:
            raise KvtailorError(
                f"asked llama.cpp for {tokens} tokens after {self.seen} of {self.cells}, and llama_decode gave {code}: "
                f"{self.model.log.since(-3)}"
            )
        self.seen += tokens

    def state(self) -> SequenceState:
        """Return what it holds, as llama.cpp saves it."""
        size = self.api.llama_state_seq_get_size(self.pointer, 0)
        data = (ctypes.c_uint8 * size)()
        written = self.api.llama_state_seq_get_data(self.pointer, data, size, 0)
        if written != size:
            raise KvtailorError(f"llama.cpp promised a state of {size:,} bytes and wrote {written:,}")
        return SequenceState.parse(bytes(data))

    def load(self, state: SequenceState) -> None:
        """Replace what it holds by a state of the same type and sizes.

        Raises:
            KvtailorError: llama.cpp refuses it, with what it logged.
        """
        data = state.pack()
        self.clear()
        before = len(self.model.log.lines)
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        read = self.api.llama_state_seq_set_data(self.pointer, pointer, data.nbytes, 0)
        if read != data.nbytes:
            raise KvtailorError(f"llama.cpp read {read:,} of {data.nbytes:,} bytes: {self.model.log.since(before)}")
        self.seen = int(state.positions.numel())

    @torch.no_grad()
    def fill(self, states: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Replace what it holds by keys and values (1, h, n, d) by layer, as transformers has them, at positions 0 on.

        Keys are those behind the rotary embedding. They are brought into the order of channels that llama.cpp has for
        this model, rotated where this cache rotates, and encoded as it encodes.
        """
        # One token shows the magic number and the layers of this very build.
        self.clear()
        self.step(0)
        own = self.state()
        if sorted(states) != list(range(len(own.keys))):
            raise KvtailorError(f"asked to fill layers {sorted(states)}, but the cache has {len(own.keys)}")
        sides = [
            [self._encoded(states[layer][side], of_keys=side == 0) for layer in sorted(states)] for side in range(2)
        ]
        count = sides[0][0].data.shape[0]
        positions = torch.arange(count, dtype=torch.int32)
        self.load(replace(own, positions=positions, keys=sides[0], values=sides[1]))

    def _encoded(self, states: Tensor, *, of_keys: bool) -> Rows:
        rows = interleaved(states[0]) if of_keys and self.model.turns_neighbours else states[0]
        if self.rotates:
            rows = rotated_rows(rows, of_keys=of_keys)
        # (h, n, d) -> (n, h * d): all heads of a token are one row.
        return Rows(kind=self.kind, data=self.kind.encode(rows.transpose(0, 1).flatten(1)))

    def converted(self, state: SequenceState, size: int) -> SequenceState:
        """Return a state of a cache that does not rotate, as this cache would hold it.

        Args:
            state: of an `f32`, `f16` or `bf16` cache.
            size: channels of a head.
        """

        return self._recoded(state, size, self.kind)

    def restored(self, state: SequenceState, size: int, kind: RowKind) -> SequenceState:
        """Return a state of this cache in another type that does not rotate, with the numbers that it stands for.

        Args:
            state: of this cache.
            size: channels of a head.
            kind: of the rows that are returned: `f32`, `f16` or `bf16`.
        """
        return self._recoded(state, size, kind)

    def _recoded(self, state: SequenceState, size: int, kind: RowKind) -> SequenceState:
        """Rows of another type, rotated where this cache rotates. The rotation is its own inverse."""

        def rows(each: Rows, *, of_keys: bool) -> Rows:
            # (cells, row) -> (cells, h, d)
            numbers = each.kind.decode(each.data).unflatten(-1, (-1, size))
            numbers = rotated_rows(numbers, of_keys=of_keys) if self.rotates else numbers
            return Rows(kind=kind, data=kind.encode(numbers.flatten(-2)))

        return replace(
            state,
            keys=[rows(each, of_keys=True) for each in state.keys],
            values=[rows(each, of_keys=False) for each in state.values],
        )


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set variables that C reads by getenv, and put the old ones back."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
