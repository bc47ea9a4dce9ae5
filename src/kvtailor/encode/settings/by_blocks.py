"""How many tokens stay whole, and how many are encoded at once."""

from __future__ import annotations

__all__ = ["ByBlocks", "ByGroups"]


class ByBlocks:
    """Codecs that keep the newest `recent` tokens and encode `block_size` at once. Stands before `Codec`."""

    recent: int
    block_size: int

    @property
    def tail(self) -> int:
        return self.recent

    @property
    def block(self) -> int:
        return self.block_size

    def check_tokens(self, codec: str) -> None:
        """Raise `ValueError` for numbers of tokens that make no sense."""
        if self.recent < 0:
            raise ValueError(f"{codec}: recent must be 0 or more tokens, found {self.recent}")
        if self.block_size < 1:
            raise ValueError(f"{codec}: block_size must be 1 token or more, found {self.block_size}; 128 is usual")


class ByGroups(ByBlocks):
    """Codecs whose blocks are whole groups of `group` tokens, which share a scale. Stands before `Codec`."""

    group: int

    @property
    def lane_multiple(self) -> int:
        """Scales run along time."""
        return self.group

    def check_groups(self, codec: str) -> None:
        """Raise `ValueError` for blocks that are not whole groups."""
        if self.block_size < self.group or self.block_size % self.group:
            raise ValueError(
                f"{codec}: block_size must be a multiple of its group, and block_size={self.block_size} is none of "
                f"group={self.group}; write block_size={max(1, round(self.block_size / self.group)) * self.group}"
            )
