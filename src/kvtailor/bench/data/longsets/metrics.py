"""The official metrics of LongBench and ZeroSCROLLS, quirks included: a number is worth what it can be compared with.

LongBench (github.com/THUDM/LongBench, MIT): `qa_f1`, `qa_f1_zh`, `rouge_l`, `rouge_l_zh`, `classification`,
`retrieval`, `retrieval_zh`, `count`, `code_similarity`. Code similarity is that of `difflib`, which is what the
official requirements install; with the package python-Levenshtein beside them the official script gives other values.

ZeroSCROLLS (huggingface.co/datasets/tau/zero_scrolls): `rouge_geometric_mean`, `f1`, `accuracy`,
`exponential_similarity`, `concordance_index`. The geometric mean is taken of the means over all examples, so that it
is not the mean of the examples' own scores.

ROUGE-L as LongBench reports it, which is that of the package `rouge` 1.0.1 and not that of the ROUGE papers.

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

import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache
from itertools import combinations
from statistics import fmean
from typing import Any

from kvtailor.bench.data.sources import library
from kvtailor.errors import KvtailorError, UnknownName

__all__ = ["METRICS", "overall", "rouge_l", "score_example"]

_ROUGE_MEAN = "rouge_geometric_mean"
_ROUGES = ("rouge1", "rouge2", "rougeL")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = {ord(each): None for each in string.punctuation}
# The Chinese punctuation of LongBench's normalisation.
_CHINESE = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣"
    "､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_NO_PUNCTUATION_ZH = _NO_PUNCTUATION | {ord(each): None for each in _CHINESE}
_PERCENTAGE = re.compile(r"\d+\.?\d*%")
_LETTER = re.compile(r"\b[A-D]\b")


def score_example(
    metric: str, prediction: str, references: Sequence[str], classes: Sequence[str] = ()
) -> dict[str, float]:
    """What a prediction is worth.

    Args:
        metric: one of `METRICS`.
        prediction: the text that was generated, after the set's own clipping.
        references: right answers; the best one counts (of each kind of ROUGE).
        classes: names of all classes, where the metric is `classification`.

    Returns:
        `score`, 0.0 to 100.0; with the geometric mean of ROUGE also the three that it is made of.

    Raises:
        UnknownName: there is no such metric.
        KvtailorError: there is no reference, one of them is none for this metric, or a library is missing.
    """
    if metric not in METRICS:
        raise UnknownName("metric", metric, METRICS)
    if not references:
        raise KvtailorError(f"asked for the {metric} of a prediction without a right answer: give one at least")
    if metric == _ROUGE_MEAN:
        found = [_rouge(prediction, reference) for reference in references]
        best = {name: 100 * max(each[name] for each in found) for name in _ROUGES}
        return {"score": _geometric_mean(best), **best}
    scorer = _CLASSWISE.get(metric) or _PLAIN[metric]
    given = (classes,) if metric in _CLASSWISE else ()
    return {"score": 100 * max(scorer(prediction, reference, *given) for reference in references)}


def overall(metric: str, found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The numbers of all examples together, as the official scripts report them but for rounding."""
    means = {name: fmean(each[name] for each in found) for name in found[0]}
    return means | {"score": _geometric_mean(means)} if metric == _ROUGE_MEAN else means


def _qa_f1(prediction: str, reference: str) -> float:
    return _f1(_words(prediction).split(), _words(reference).split())


def _words(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def _f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    same = (Counter(prediction) & Counter(reference)).total()
    if not same:
        return 0.0
    precision, recall = same / len(prediction), same / len(reference)
    return (2 * precision * recall) / (precision + recall)


def _qa_f1_zh(prediction: str, reference: str) -> float:
    found = []
    for text in (prediction, reference):
        words = ("".join(word.lower().translate(_NO_PUNCTUATION_ZH).split()) for word in _cut(text))
        found.append([word for word in words if word])
    return _f1(*found)


def _rouge_l_zh(prediction: str, reference: str) -> float:
    return rouge_l(" ".join(_cut(prediction)), " ".join(_cut(reference)))


def _cut(text: str) -> list[str]:
    """Chinese words."""
    return list(_jieba().cut(text, cut_all=False))


@cache
def _jieba() -> Any:
    jieba = library("jieba", "jieba", "the metric of a Chinese set")
    jieba.setLogLevel("WARNING")
    return jieba


def _classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    named = [each for each in classes if each in prediction]
    at = 0
    while at < len(named):
        if named[at] in reference and named[at] != reference:
            # As in the official script, the name that follows one that is taken out is passed over.
            named.remove(named[at])
        at += 1
    return 1.0 / len(named) if reference in named else 0.0


def _retrieval(pattern: str) -> Callable[[str, str], float]:
    def score(prediction: str, reference: str) -> float:
        right = re.search(pattern, reference)
        if right is None:
            raise KvtailorError(f"asked for a retrieval score, but the right answer {reference!r} names no paragraph")
        return _count(prediction, right[1])

    return score


def _count(prediction: str, reference: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def _code_similarity(prediction: str, reference: str) -> float:
    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if code == reference:
        return 1.0
    return round(100 * SequenceMatcher(None, code, reference).ratio()) / 100 if code and reference else 0.0


def _rouge(prediction: str, reference: str) -> dict[str, float]:
    found = _rouge_scorer().score(reference, prediction)
    return {name: float(found[name].fmeasure) for name in _ROUGES}


@cache
def _rouge_scorer() -> Any:
    scorer = library("rouge_score.rouge_scorer", "rouge-score", "a ROUGE score of ZeroSCROLLS")
    return scorer.RougeScorer(list(_ROUGES), use_stemmer=False)


def _geometric_mean(scores: Mapping[str, float]) -> float:
    return float((scores["rouge1"] * scores["rouge2"] * scores["rougeL"]) ** (1 / 3))


def _f1_plain_letters(prediction: str, reference: str) -> float:
    return _f1(_plain_letters(_words(prediction)).split(), _plain_letters(_words(reference)).split())


def _plain_letters(text: str) -> str:
    if text.isascii():
        return text
    return str(library("unidecode", "Unidecode", "ZeroSCROLLS' F1 of a text with letters beyond ASCII").unidecode(text))


def _accuracy(prediction: str, reference: str) -> float:
    right, found = _LETTER.search(reference), _LETTER.search(prediction)
    if right is None:
        raise KvtailorError(f"asked for an accuracy, but the right answer {reference!r} is none of A, B, C, D")
    return float(found is not None and found[0] == right[0])


def _exponential_similarity(prediction: str, reference: str) -> float:
    right, found = _PERCENTAGE.search(reference), _PERCENTAGE.search(prediction)
    if right is None:
        raise KvtailorError(f"asked for a similarity of percentages, but the right answer {reference!r} has none")
    return 0.0 if found is None else float(0.5 ** (abs(float(right[0][:-1]) - float(found[0][:-1])) / 10))


def _concordance_index(prediction: str, reference: str) -> float:
    right, found = _ids(reference), _ids(prediction)
    if sorted(right) != list(range(1, len(right) + 1)) or len(right) < 2:
        raise KvtailorError(f"asked for a concordance index, but the right answer {reference!r} is no order of 1 to n")
    if sorted(found) != sorted(right):
        return 0.0
    pairs = list(combinations(right, 2))
    return sum(found.index(one) < found.index(other) for one, other in pairs) / len(pairs)


def _ids(text: str) -> list[int]:
    try:
        return [int(each) for each in re.sub(r"[^0-9\s,]", "", text).replace(",", " ").split()]
    except ValueError:
        # A number of more digits than Python reads is no id of a summary.
        return []


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


_PLAIN: dict[str, Callable[..., float]] = {
    "qa_f1": _qa_f1,
    "qa_f1_zh": _qa_f1_zh,
    "rouge_l": rouge_l,
    "rouge_l_zh": _rouge_l_zh,
    "retrieval": _retrieval(r"Paragraph (\d+)"),
    "retrieval_zh": _retrieval(r"段落(\d+)"),
    "count": _count,
    "code_similarity": _code_similarity,
    "f1": _f1_plain_letters,
    "accuracy": _accuracy,
    "exponential_similarity": _exponential_similarity,
    "concordance_index": _concordance_index,
}
_CLASSWISE: dict[str, Callable[..., float]] = {"classification": _classification}
METRICS: tuple[str, ...] = (*_PLAIN, *_CLASSWISE, _ROUGE_MEAN)


_NEVER_ZERO = 1e-8
