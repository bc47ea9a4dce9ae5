"""Segments: every part is read as it lies, and one softmax goes over all of them.

*Idea* The parts are never joined in memory: each gives its logits, one float32 softmax goes over all of them, and each
part adds its share of the output. A prompt, which is many queries on one part, goes through torch's own kernel in
blocks of queries.
*Paper* None; the softmax over parts is the usual one.
*Source* None.
*Departs* Nothing known.
*Cost* Decoding: t * g * n float32 logits for each kv head, in blocks of queries above 16 MiB. A prompt: nothing beyond
torch's kernel, or 16 to 40 MiB of scratch where a mass is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvtailor.attend.contract import READS_ALL, Attended, Attention, AttentionRequest, FastPathReading, FlopsRequest
from kvtailor.ops.attention.parts import counting, read_all
from kvtailor.types import Segment

__all__ = ["Segments"]


@dataclass(frozen=True, kw_only=True)
class Segments(Attention):
    """Reads every held token. The default of the stage.

    Computes on the cache's dtype with float32 logits and softmax, whatever the query's dtype; the output has the
    query's. `Attended.lse` is given on all paths but those of a prompt on one part.
    """

    gives_mass: ClassVar[bool] = True
    weighs_tokens: ClassVar[bool] = True
    graph_safe: ClassVar[bool] = True

    def read_on_fast_path(self, layer: int, parts: Sequence[Segment]) -> FastPathReading:
        """All of any number."""
        return FastPathReading()

    def prompt_pass(self) -> str:
        """See `Attention.prompt_pass`."""
        return READS_ALL

    def attend(self, request: AttentionRequest) -> Attended:
        """See `Attention.attend`."""
        counts = counting(request.query, request.want_mass, request.real_queries)
        read = read_all(request.query, request.parts, request.visible, request.scaling, counts, request.softmax)
        return Attended(output=read.output, lse=read.lse, mass=read.mass)

    def flops(self, request: FlopsRequest) -> int:
        """0: nothing beyond the reading."""
        return 0
