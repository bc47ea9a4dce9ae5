"""Recipe, step 4: export. ``python -m recipes.demo.export`` writes the checkpoint's weights, config, tokenizer.

bfloat16 safetensors into ``kvtailor/demo/weights/NAME``, where ``kvtailor.hf.model.loading.load(NAME)`` finds them. The
model card in that folder is written by hand and kept.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer

from kvtailor.errors import FileError
from kvtailor.hf.model.loading import new_model, save, wrap_tokenizer
from recipes import demo
from recipes.demo.architecture import ARCHITECTURES
from recipes.demo.checkpoint import load_checkpoint
from recipes.demo.tokenizer import BOS, EOS, PAD

__all__ = ["export", "main"]


SHARD = "8MB"


def export(name: str, checkpoint: Path, tokenizer_file: Path, folder: Path) -> int:
    """Write the model ``name`` of `ARCHITECTURES` from ``checkpoint`` into ``folder``.

    Returns:
        Bytes of all files in ``folder``.

    Raises:
        FileError: no such checkpoint or tokenizer.
    """
    saved = load_checkpoint(checkpoint)
    for needed, there in ((checkpoint, saved is not None), (tokenizer_file, tokenizer_file.is_file())):
        if not there:
            raise FileError(
                f"asked to export {needed}, which does not exist: run the recipe's earlier steps, "
                "or give --work and --run"
            )
    entries = Tokenizer.from_file(str(tokenizer_file)).get_vocab_size()
    model = new_model(**ARCHITECTURES[name], vocab_size=entries)
    assert saved is not None
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(saved[0][f"model.{parameter_name}"])
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    tokenizer = wrap_tokenizer(tokenizer_file, bos=BOS, eos=EOS, pad=PAD, longest=model.config.max_position_embeddings)
    save(model.to(torch.bfloat16), tokenizer, folder, shard=SHARD)
    for file in folder.iterdir():
        file.chmod(0o644)
    return sum(file.stat().st_size for file in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=demo.work_folder(), help="folder of the earlier steps")
    parser.add_argument("--model", choices=list(ARCHITECTURES), default="demo")
    parser.add_argument("--run", help="name of the checkpoint in the work folder; default: the model's name")
    parser.add_argument("--to", type=Path, help="folder to write; default: where the package keeps its models")
    given = parser.parse_args()
    folder = given.to or demo.path(given.model)
    held = export(given.model, given.work / (given.run or given.model), given.work / "tokenizer.json", folder)
    print(f"{held:,} bytes in {folder}")


if __name__ == "__main__":
    main()
