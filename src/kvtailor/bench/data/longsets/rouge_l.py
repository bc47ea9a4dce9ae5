"""ROUGE-L as LongBench reports it, which is that of the package `rouge` 1.0.1 and not that of the ROUGE papers.

The package is no longer kept, so that its formula is here. Sentences end at each full stop. Over all pairs of a
reference and a predicted sentence, the words of one longest common subsequence are collected in a set; precision and
recall are its size over the number of different words in the prediction and in the reference:

    F = 2 P R / (P + R + 1e-8)

Which subsequence it is, where several are longest, shows in the result; the package's choice is kept. Its own code
recurses once for each word of two sentences and gives up (the official script then scores 0) where Python allows no
deeper; this one does not.

Source: github.com/pltrdy/rouge, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["rouge_l"]

_NEVER_ZERO = 1e-8


def rouge_l(prediction: str, reference: str) -> float:
    """F-measure, 0.0 to 1.0; 0.0 where one of the texts has no sentence."""
    predicted, referred = _sentences(prediction), _sentences(reference)
    if not predicted or not referred:
        return 0.0
    common = {word for one in referred for other in predicted for word in _subsequence(one, other)}
    precision = len(common) / len({word for sentence in predicted for word in sentence})
    recall = len(common) / len({word for sentence in referred for word in sentence})
    return 2.0 * ((precision * recall) / (precision + recall + _NEVER_ZERO))


def _sentences(text: str) -> list[list[str]]:
    """Words by sentence; one that is blank has a single empty word."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _subsequence(reference: Sequence[str], prediction: Sequence[str]) -> Iterator[str]:
    """The words of a longest common subsequence, the last one first."""
    lengths = [[0] * (len(prediction) + 1)]
    for word in reference:
        above, row = lengths[-1], [0]
        for j, other in enumerate(prediction):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        lengths.append(row)
    i, j = len(reference), len(prediction)
    while i and j:
        if reference[i - 1] == prediction[j - 1]:
            yield reference[i - 1]
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
