"""An attention that says of a prompt what is not true of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvtailor.attend.contract import READS_ALL, Attended, AttentionRequest
from kvtailor.attend.segments import Segments

__all__ = ["Louder"]


@dataclass(frozen=True, kw_only=True)
class Louder(Segments):
    """Gives more than the attention of `segments`, and says that it gives the same."""

    def prompt_pass(self) -> str:
        return READS_ALL

    def attend(self, request: AttentionRequest) -> Attended:
        attended = super().attend(request)
        return replace(attended, output=attended.output * 1.01)
