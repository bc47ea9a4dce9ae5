"""Recipe, step 1: train the tokenizer. ``python -m recipes.demo.tokenizer`` (about half a minute on one core).

Byte-level BPE, so that every text round-trips; single digits, so that numbers are copied digit by digit; a word carries
its leading space, so that ``prompt + answer`` has the tokens of the prompt and then those of the answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvtailor.bench.data.synthetic.documents import SPLITS, TASKS, make_document
from kvtailor.bench.data.synthetic.word_lists import LISTS
from recipes import demo
from recipes.demo.corpus import read_corpus

__all__ = ["WORDS", "generated", "main", "train"]

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """Train a tokenizer of ``vocabulary`` entries, which puts bos before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS, PAD],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def generated(count: int) -> Iterator[str]:
    """``count`` generated documents of 2,000 characters, all tasks in turn, from training states."""
    tasks = [*TASKS, *LISTS]
    for i in range(count):
        document = make_document(tasks[i % len(tasks)], state=SPLITS["train"].stop - 1 - i, split="train", length=2000)
        yield document.prompt + document.answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=demo.data_folder(), help="folder that has train_corpus/")
    parser.add_argument("--work", type=Path, default=demo.work_folder(), help="folder for tokenizer.json")
    parser.add_argument("--vocabulary", type=int, default=5120)
    parser.add_argument("--megabytes", type=int, default=30, help="of corpus text to learn from")
    given = parser.parse_args()

    def texts() -> Iterator[str]:
        for _, text in read_corpus(given.data, given.megabytes * 1_000_000):
            yield text
        yield from generated(600)

    given.work.mkdir(parents=True, exist_ok=True)
    tokenizer = train(texts(), given.vocabulary)
    tokenizer.save(str(given.work / "tokenizer.json"))
    print(f"{tokenizer.get_vocab_size()} entries in {given.work / 'tokenizer.json'}")


if __name__ == "__main__":
    main()
