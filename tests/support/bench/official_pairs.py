"""Makes `tests/data/official_scores.json`: varied pairs, and what the official scripts say of them.

The scripts of LongBench and ZeroSCROLLS are not part of this repository. With LongBench's `metrics.py` in one folder,
the files of huggingface.co/datasets/tau/zero_scrolls/tree/main/metrics in another, and in a Python environment of its
own

    pip install rouge==1.0.1 jieba==0.42.1 fuzzywuzzy==0.18.0 rouge-score==0.1.2 lifelines==0.30.3 unidecode==1.4.0
    python tests/support/bench/official_pairs.py LONGBENCH_FOLDER ZEROSCROLLS_FOLDER > tests/data/official_scores.json

makes it again (python-Levenshtein must not be there: LongBench's requirements do not name it, and values differ).
"""

from __future__ import annotations

import importlib.metadata
import json
import random
import sys
from collections.abc import Callable

COUNT = 100
PACKAGES = ("rouge", "jieba", "fuzzywuzzy", "rouge-score", "lifelines", "unidecode")
ORIGINS = {
    "longbench": "github.com/THUDM/LongBench 2e00731f8d0bff23dc4325161044d0ed8af94c1e LongBench/metrics.py",
    "zeroscrolls": "huggingface.co/datasets/tau/zero_scrolls 9af1d79992edc35db68c85db9bdc5d8aa4706a7c metrics/*.py",
}
_ENGLISH = (
    "a the an and of river stone cache memory model attention budget token layer small large quick slow winter summer "
    "paper writes reads keeps forgets found lost seven 12 1984 3.14 yes no unanswerable Anna Boris O'Neill U.S. "
    "state-of-the-art e.g. (maybe) “quoted” café naïve Zürich Straße — … don't it's ε 数字 Ωmega x² 50% $5 #1 A B"
)
_CHINESE = (
    "我们 研究 模型 的 注意力 缓存 在 长 文本 中 北京 大学 厦门大学 2019年 第十八届 会议 讨论 了 "
    "预算 和 内存 压缩 方法 这 篇 文章 提出 一种 新 的 结果 表明 效果 很 好 中国 美国 文学 "
    "Transformer GPU 百分之五 小明 去 图书馆 学习 然后 回家"
)
CLASSES = (
    "Abbreviation",
    "City",
    "Other location",
    "Location",
    "Number of something",
    "Number",
    "Other number",
    "Human",
    "Group or organization of person",
    "Group",
    "Group or organization",
    "Individual",
    "民族",
    "民族宗教",
    "体育",
)
_CODE = (
    "return x + 1|def run(self, name: str) -> None:|    for i in range(10):|# a comment|x = y // 2|```python|```|"
    "    self.cache[key] = value|}|if (a != b) { return; }|import os|const f = (x) => x * 2;|print(f'{name!r}')|\t|"
    "public static void main(String[] args) {|    assert total == sum(parts), 'parts'"
)
WORDS, CHINESE, CODE = _ENGLISH.split(), _CHINESE.split(), _CODE.split("|")
Draw = random.Random


def sentence(draw: Draw, words: list[str], most: int, between: str = " ") -> str:
    return between.join(draw.choice(words) for _ in range(draw.randint(0, most)))


def english(draw: Draw) -> str:
    kind = draw.randrange(10)
    if kind == 9:
        return ". ".join(sentence(draw, WORDS, 40) for _ in range(12))
    if kind == 0:
        return draw.choice(["", " ", ".", "...", "?!", "\n", "the", "The. A. An.", "  .  . ", "，。", "\t.\n"])
    if kind == 1:
        return (draw.choice(WORDS) + " ") * draw.randint(2, 30)
    if kind == 2:
        return ".\n".join(sentence(draw, WORDS, 25) for _ in range(draw.randint(1, 7)))
    if kind == 3:
        return ". ".join(sentence(draw, WORDS[:24], 9).capitalize() for _ in range(draw.randint(1, 12))) + "."
    return sentence(draw, WORDS, draw.choice([3, 6, 40]))


def chinese(draw: Draw) -> str:
    if draw.randrange(8) == 0:
        return draw.choice(["", "。", "，", " ", "是", "ABC 12.5", "！！！", "……"])
    marks = ["，", "。", "；", "：“", "”", " ", "、", "."]
    return "".join(sentence(draw, CHINESE, 12, "") + draw.choice(marks) for _ in range(draw.randint(1, 6)))


def changed(draw: Draw, text: str, other: Callable[[Draw], str]) -> str:
    """Another text, or the same, or one that shares a part with it."""
    kind = draw.choice([0, 1, 2, 2, 3, 4, 4, 5, 5, 5])
    if kind == 0:
        return text
    if kind == 1:
        return other(draw)
    cut = draw.randint(0, len(text))
    if kind == 2:
        return text[cut:] + other(draw)
    if kind == 3:
        return text[:cut].upper()
    words = text.split(" ")
    if kind == 4:
        draw.shuffle(words)
    return " ".join(word + draw.choice(["", "", "", "s"]) for word in words if draw.random() < 0.8)


def texts(draw: Draw, make: Callable[[Draw], str]) -> list[list[str]]:
    found = []
    for _ in range(COUNT):
        reference = make(draw)
        found.append([changed(draw, reference, make), reference])
    return found


def classified(draw: Draw) -> list[list[str]]:
    found = []
    for _ in range(COUNT):
        right = draw.choice([*CLASSES, "Group or organization of person", "Group or organization of person"])
        named = draw.sample(CLASSES, draw.randint(0, 2)) + draw.choice([[right], [right], []])
        draw.shuffle(named)
        found.append([draw.choice([", ", " or ", " "]).join(named), right])
    return found


def numbered(draw: Draw, before: str) -> list[list[str]]:
    found = []
    for _ in range(COUNT):
        right = draw.randint(1, 30)
        guesses = [draw.choice([before + str(right), str(right), f"{draw.randint(1, 30)}", "none", f"0{right}", "²"])]
        guesses += [str(draw.randint(1, 30)) for _ in range(draw.choice([0, 0, 1, 3]))]
        draw.shuffle(guesses)
        found.append([" ".join(guesses) if draw.random() < 0.95 else "", f"{before}{right}"])
    return found


def programs(draw: Draw) -> list[list[str]]:
    found = []
    for _ in range(COUNT):
        right = draw.choice(CODE) if draw.random() < 0.8 else " ".join(draw.choice(CODE) for _ in range(30))
        lines = [draw.choice(CODE) for _ in range(draw.randint(0, 4))]
        lines.insert(draw.randint(0, len(lines)), changed(draw, right, lambda draw: draw.choice(CODE)))
        found.append([draw.choice(["", "\n", "\n\n", " "]) + "\n".join(lines), right])
    return found


def letters(draw: Draw) -> list[list[str]]:
    forms = ["{}", "({})", "The answer is {}.", "{}) because", "A or {}", "answer{}", "", "{}{}", "I. {}", "{}\n\nB"]
    return [[draw.choice(forms).replace("{}", draw.choice("ABCDEabc")), draw.choice("ABCD")] for _ in range(COUNT)]


def percentages(draw: Draw) -> list[list[str]]:
    forms = ["{}%", "about {}% of them", "{} %", "{}", "", "{}.5%", "{}.%", "-{}%", "{}% or 3%", "100{}%"]
    return [[draw.choice(forms).format(draw.randint(0, 100)), f"{draw.randint(0, 50) * 2}%"] for _ in range(COUNT)]


def orders(draw: Draw) -> list[list[str]]:
    found = []
    for _ in range(COUNT):
        right = draw.sample(range(1, 16), 15)[: draw.randint(2, 15)]
        right = [sorted(right).index(each) + 1 for each in right]
        guess = draw.sample(right, len(right)) if draw.random() < 0.6 else list(right)
        for _ in range(draw.choice([0, 0, 1, 2])):
            one, other = (draw.randrange(len(guess)) for _ in range(2))
            guess[one], guess[other] = guess[other], guess[one]
        if draw.random() < 0.15:
            guess[0] = draw.choice([0, 1, 99])
        form = draw.choice([", ", ",", " ", " -> ", ", Summary ", "\n"])
        found.append(
            [draw.choice(["", "Order: ", "I think "]) + form.join(map(str, guess)), ", ".join(map(str, right))]
        )
    return found


def pairs() -> dict[str, list[list[str]]]:
    """The pairs of prediction and right answer, the same at every call."""
    return {
        "english": texts(random.Random(1), english),
        "chinese": texts(random.Random(2), chinese),
        "classes": classified(random.Random(3)),
        "paragraphs": numbered(random.Random(4), "Paragraph "),
        "paragraphs_zh": numbered(random.Random(5), "段落"),
        "counts": numbered(random.Random(6), ""),
        "code": programs(random.Random(7)),
        "letters": letters(random.Random(8)),
        "percentages": percentages(random.Random(9)),
        "orders": orders(random.Random(10)),
    }


def official(longbench: str, zeroscrolls: str) -> dict[str, dict[str, list[float]]]:
    """What the official scripts say of each pair, 0.0 to 1.0, by kind of pair and our name of the metric."""
    # ZeroSCROLLS' own `rouge.py` must not hide the package that LongBench imports.
    sys.path[:] = [longbench, *sys.path, zeroscrolls]
    import accuracy
    import concordance_index
    import exp_similarity
    import f1
    import metrics
    import rouge_score.rouge_scorer

    # As `rouge.py` does, without its pool of processes.
    kinds = ("rouge1", "rouge2", "rougeL")
    rouge = rouge_score.rouge_scorer.RougeScorer(kinds, use_stemmer=False)
    scripts = {
        "english": {
            "qa_f1": metrics.qa_f1_score,
            "rouge_l": metrics.rouge_score,
            "f1": f1.f1_score,
            **{kind: lambda p, r, kind=kind: rouge.score(r, p)[kind].fmeasure for kind in kinds},
        },
        "chinese": {"qa_f1_zh": metrics.qa_f1_zh_score, "rouge_l_zh": metrics.rouge_zh_score},
        "classes": {"classification": lambda p, r: metrics.classification_score(p, r, all_classes=list(CLASSES))},
        "paragraphs": {"retrieval": metrics.retrieval_score},
        "paragraphs_zh": {"retrieval_zh": metrics.retrieval_zh_score},
        "counts": {"count": metrics.count_score},
        "code": {"code_similarity": metrics.code_sim_score},
        "letters": {"accuracy": accuracy.accuracy_score},
        "percentages": {"exponential_similarity": exp_similarity.exp_similarity_score},
        "orders": {"concordance_index": concordance_index.concordant_index_score},
    }
    return {
        kind: {name: [float(script(*pair)) for pair in found] for name, script in scripts[kind].items()}
        for kind, found in pairs().items()
    }


def main() -> None:
    longbench, zeroscrolls = sys.argv[1:]
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    found = {"origins": ORIGINS, "versions": versions, "classes": CLASSES, "pairs": pairs()}
    found["scores"] = official(longbench, zeroscrolls)
    # One kind of pair on a line.
    print(
        json.dumps(found, ensure_ascii=False, separators=(",", ":"))
        .replace(']],"', ']],\n"')
        .replace('"scores"', '\n"scores"')
    )


if __name__ == "__main__":
    main()
