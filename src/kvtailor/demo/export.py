"""Recipe, step 4: export. ``python -m kvtailor.demo.export`` writes the checkpoint's weights, config, tokenizer.

bfloat16 safetensors into ``kvtailor/demo/weights``, where ``kvtailor.hf.loading.load("demo")`` finds them. The model
card in that folder is written by hand and kept.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer

from kvtailor import demo
from kvtailor.demo.tokenizer import BOS, EOS, PAD
from kvtailor.demo.train import ARCHITECTURE
from kvtailor.hf.loading import new_llama, save, wrap_tokenizer

__all__ = ["export", "main"]


def export(checkpoint: Path, tokenizer_file: Path, folder: Path) -> int:
    """Write the model of ``checkpoint`` into ``folder``.

    Returns:
        Bytes of all files in ``folder``.

    Raises:
        FileNotFoundError: no such checkpoint or tokenizer.
    """
    for needed in (checkpoint, tokenizer_file):
        if not needed.is_file():
            raise FileNotFoundError(
                f"asked to export {needed}, which does not exist: run the recipe's earlier steps, "
                "or give --work and --run"
            )
    entries = Tokenizer.from_file(str(tokenizer_file)).get_vocab_size()
    model = new_llama(**ARCHITECTURE, vocab_size=entries)
    model.load_state_dict(torch.load(checkpoint, weights_only=False)["model"])
    tokenizer = wrap_tokenizer(tokenizer_file, bos=BOS, eos=EOS, pad=PAD, longest=model.config.max_position_embeddings)
    save(model.to(torch.bfloat16), tokenizer, folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    return sum(file.stat().st_size for file in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=demo.work_folder(), help="folder of the earlier steps")
    parser.add_argument("--run", default="run", help="name of the checkpoint in the work folder")
    parser.add_argument("--to", type=Path, default=demo.path(), help="folder to write")
    given = parser.parse_args()
    held = export(given.work / f"{given.run}.pt", given.work / "tokenizer.json", given.to)
    print(f"{held:,} bytes in {given.to}")


if __name__ == "__main__":
    main()
