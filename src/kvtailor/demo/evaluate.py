"""Recipe, step 5: measure, uncompressed. ``python -m kvtailor.demo.evaluate`` (a few minutes on one core).

Bits per byte of natural text over consecutive windows that each start with bos, and the share of generated evaluation
documents whose answer the model continues greedily, by task, length and depth.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvtailor import demo
from kvtailor.bench.synthetic import TASKS, make_document
from kvtailor.hf.loading import load

__all__ = ["ASKED", "ROOM_TO_ANSWER", "Retrieval", "bits_per_byte", "continues_with", "main", "retrieval", "table"]

ROOM_TO_ANSWER = 48

ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    **{task: (task, {}) for task in TASKS},
    "key_value": ("key_value", {"records": 16, "prose": True}),
    "key_value_full": ("key_value", {}),
}
"""Name in the table -> task and its options; ``key_value`` hides 16 records in prose, ``_full`` has as many as fit."""


@dataclass(frozen=True)
class Retrieval:
    """Greedy retrieval of one task at one length and depth.

    Attributes:
        task: one of `ASKED`.
        length: tokens of prompt and answer at most.
        depth: where the fact stands, 0.0 to 1.0.
        right: documents whose whole answer is the greedy continuation.
        asked: documents.
    """

    task: str
    length: int
    depth: float
    right: int
    asked: int


@torch.inference_mode()
def continues_with(model: Any, tokenizer: Any, prompt: str, answer: str) -> bool:
    """Whether the greedy continuation of ``prompt`` begins with ``answer``, in one pass.

    Greedy decoding takes the answer's tokens exactly if each is the most likely one after the prompt and those before.
    """
    before = tokenizer(prompt)["input_ids"]
    wanted = tokenizer(answer, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([before + wanted], device=model.device)
    logits = model(ids, use_cache=False, logits_to_keep=len(wanted) + 1).logits[0, :-1]
    return bool(logits.argmax(-1).tolist() == wanted)


def retrieval(
    model: Any, tokenizer: Any, tasks: list[str], lengths: list[int], depths: list[float], documents: int
) -> Iterator[Retrieval]:
    """Retrieval of ``tasks`` (of `ASKED`) on ``documents`` states for each length (tokens) and depth, all different."""

    def count_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    for name in tasks:
        task, options = ASKED[name]
        for length in lengths:
            for i, depth in enumerate(depths):
                right = 0
                for state in range(i * documents, (i + 1) * documents):
                    document = make_document(
                        task,
                        state=state,
                        length=length - ROOM_TO_ANSWER,
                        depth=depth,
                        count_tokens=count_tokens,
                        **options,
                    )
                    right += continues_with(model, tokenizer, document.prompt, document.answer)
                yield Retrieval(name, length, depth, right, documents)


@torch.inference_mode()
def bits_per_byte(model: Any, tokenizer: Any, text: str, window: int, windows: int) -> tuple[float, int]:
    """Bits per UTF-8 byte over the first ``windows`` windows of ``window`` tokens (bos included in each).

    Returns:
        Bits per byte, and the number of windows that the text had.
    """
    ids = tokenizer(text[: windows * window * 8], add_special_tokens=False, verbose=False)["input_ids"]
    bits, held, count = 0.0, 0, 0
    for start in range(0, min(len(ids) - window + 2, windows * (window - 1)), window - 1):
        piece = ids[start : start + window - 1]
        inputs = torch.tensor([[tokenizer.bos_token_id, *piece]], device=model.device)
        logits = model(inputs, use_cache=False).logits[0, :-1].float()
        bits += torch.nn.functional.cross_entropy(logits, inputs[0, 1:], reduction="sum").item() / math.log(2)
        held += sum(map(len, tokenizer.convert_ids_to_tokens(piece)))
        count += 1
    return bits / held, count


def table(results: list[Retrieval], lengths: list[int]) -> str:
    """Markdown: one line per task, one column per length, percent right over all depths."""
    lines = ["| task | " + " | ".join(map(str, lengths)) + " |", "|---" * (len(lengths) + 1) + "|"]
    for task in dict.fromkeys(result.task for result in results):
        cells = []
        for length in lengths:
            chosen = [result for result in results if (result.task, result.length) == (task, length)]
            right, asked = (sum(getattr(result, name) for result in chosen) for name in ("right", "asked"))
            cells.append(f"{100 * right / asked:.0f} % of {asked}")
        lines.append(f"| {task} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="'demo', a folder or a hub name")
    parser.add_argument("--data", type=Path, default=demo.data_folder(), help="folder that has wikitext2/, books_eval/")
    parser.add_argument("--tasks", default=",".join(ASKED))
    parser.add_argument("--lengths", default="512,1024,2048", help="tokens of prompt and answer")
    parser.add_argument("--depths", type=int, default=10, help="number of depths from 0 to 1")
    parser.add_argument("--documents", type=int, default=4, help="per task, length and depth")
    parser.add_argument("--windows", type=int, default=50, help="of natural text")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model, tokenizer = load(given.model, dtype=torch.float32)
    lengths = [int(length) for length in given.lengths.split(",")]
    depths = [round(i / max(1, given.depths - 1), 3) for i in range(given.depths)]
    natural: dict[str, float] = {}
    texts = {
        "wikitext2 test raw": given.data / "wikitext2" / "test.raw.txt",
        **{f"novel {file.stem}": file for file in sorted((given.data / "books_eval").glob("*.txt"))[:3]},
    }
    for name, file in texts.items():
        if not file.is_file():
            print(f"{name}: no {file}, skipped (give --data or set KVTAILOR_DATA)")
            continue
        for window in (256, model.config.max_position_embeddings):
            share = max(1, given.windows * model.config.max_position_embeddings // window)
            value, count = bits_per_byte(model, tokenizer, file.read_text(encoding="utf-8"), window, share)
            natural[f"{name}, {count} windows of {window}"] = round(value, 4)
            print(f"{name}: {value:.4f} bits per byte, {count} windows of {window} tokens", flush=True)
    results = []
    for result in retrieval(model, tokenizer, given.tasks.split(","), lengths, depths, given.documents):
        results.append(result)
    print(table(results, lengths))
    print(json.dumps({"bits_per_byte": natural, "retrieval": [asdict(result) for result in results]}))


if __name__ == "__main__":
    main()
