"""Reads `docs/papers.bib`."""

from __future__ import annotations

import dataclasses
import re
import unicodedata

__all__ = ["Paper", "bibliography"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paper:
    """An entry of `docs/papers.bib`.

    Attributes:
        key: by which presets and docstrings cite it.
        title: without braces.
        authors: family names.
        year: of publication.
        number: on arXiv; empty where it is not there.
        url: where to read it; empty where nobody says.
    """

    key: str
    title: str
    authors: tuple[str, ...]
    year: str
    number: str
    url: str

    @property
    def short(self) -> str:
        """First author and year, linked."""
        name = {1: "{0}", 2: "{0} and {1}"}.get(len(self.authors), "{0} et al.").format(*self.authors or ("?",))
        return self._linked(f"{name} {self.year}")

    @property
    def long(self) -> str:
        """Authors, year and linked title."""
        return f"{', '.join(self.authors)} ({self.year}): {self._linked(self.title)}, `{self.key}`"

    def _linked(self, text: str) -> str:
        return f"[{text}]({self.url})" if self.url else text


def bibliography(text: str) -> tuple[Paper, ...]:
    """The entries of a BibTeX file whose fields stand in braces, one on a line, as ours do."""
    found = []
    for key, body in re.findall(r"^@\w+\{([^,\s]+),\n(.*?)^\}", text, re.MULTILINE | re.DOTALL):
        fields = {name: _plain(value) for name, value in re.findall(r"^\s*(\w+) = \{(.*)\},?$", body, re.MULTILINE)}
        number = fields.get("eprint", "")
        authors = (author.partition(",")[0].strip() for author in fields.get("author", "").split(" and "))
        found.append(
            Paper(
                key=key,
                title=fields.get("title", ""),
                authors=tuple(filter(None, authors)),
                year=fields.get("year", ""),
                number=number,
                url=f"https://arxiv.org/abs/{number}" if number else fields.get("url", ""),
            )
        )
    return tuple(found)


def _plain(value: str) -> str:
    r"""A BibTeX value without braces; `{\'e}` is an e with its accent."""
    marks = {"'": "\u0301", "`": "\u0300", "^": "\u0302", '"': "\u0308", "~": "\u0303", "c": "\u0327", "v": "\u030c"}
    accent = re.compile(r"\\(['`^\"~]|[cv](?=\{))\{?\\?(\w)\}?")
    text = accent.sub(lambda hit: unicodedata.normalize("NFC", hit[2] + marks[hit[1]]), value)
    return re.sub(r"[{}]", "", text).replace("---", "—").replace("--", "–").strip()
