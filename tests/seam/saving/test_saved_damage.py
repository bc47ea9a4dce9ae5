"""A saved cache with damage is refused in one sentence, whatever was damaged: no signal, no other answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvtailor
from kvtailor.errors import CacheFileError
from tests.seam.saving.test_saving import continued, saved
from tests.support.seam.flips import PLANS
from tests.support.seam.hostile import trial
from tests.support.seam.zoo import build

ROOT = Path(__file__).parents[3]
HOSTILE = (*PLANS, "nuq(bits=4, group=8, block_size=8)", "turboquant4", "streaming @ tokens=20", "nvfp4", "channels")
OLD = ROOT / "tests" / "data" / "cache_of_format_1.safetensors"
"""What kvtailor 0.1.0 saved of the llama of the zoo under `PLANS[1]`: `saved` with lengths (40, 40).

Its plan names the kernel, which was the default then; arguments have the names of today, and the plan its hash.
"""


def outcomes(flips: int, old_flips: int, folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """See `flips.count`: of saved caches of all plans, and of the old file; from a process of its own."""
    asked = {"flips": flips, "old_flips": old_flips, "folder": str(folder), "old": str(OLD)}
    command = [sys.executable, "-m", "tests.support.seam.flips", json.dumps(asked)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-500:]}"
    new, old = json.loads(done.stdout)
    return new, old


@pytest.mark.parametrize(("flips", "old_flips"), [(12, 20), pytest.param(200, 1000, marks=pytest.mark.long)])
def test_flipped_bits_are_refused_or_harmless(flips: int, old_flips: int, tmp_path: Path) -> None:
    """Anywhere in the file: length, header, texts, tensors. Every byte is under a checksum, so none is harmless.

    What a file without checksums holds can change without a word, but no flip in it ends the process.
    """
    new, old = outcomes(flips, old_flips, tmp_path)
    assert new == {"refused": flips * len(PLANS)}
    assert old.keys() <= {"refused", "harmless", "other answer"} and old["refused"] > old_flips / 5


def test_a_file_without_checksums_is_read_with_a_warning(tmp_path: Path) -> None:
    model, cache, mask = saved("llama", PLANS[1], tmp_path / "new.safetensors", lengths=(40, 40))
    with pytest.warns(UserWarning, match="no checksums and no fingerprint") as told:
        old = kvtailor.load_cache(model, OLD)
    assert len(told) == 1
    assert torch.equal(old.held(), cache.held()) and old.seen == cache.seen
    expected, found = continued(model, cache, mask), continued(model, old, mask)
    assert torch.allclose(found[1], expected[1], atol=1e-3, rtol=1e-3)


def altered(name: str, change, path: Path) -> Path:
    """The old file with another tensor under a name."""
    tensors = load_file(OLD)
    with open(OLD, "rb") as file:
        about = json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"]
    tensors[name] = change(tensors[name].clone())
    save_file(tensors, path, about)
    return path


def put(at: tuple[int, ...], number: int):
    def change(tensor):
        tensor[at] = number
        return tensor

    return change


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("owner", put((0,), 1 << 40), "owner go from 1 to 1099511627776, and must be from 0 to 3"),
        ("owner", put((0,), -1), "owner go from -1 to 3"),
        ("owner", lambda owner: owner.flip(0), "owners of a layout's lanes do not ascend"),
        (
            "owner",
            lambda owner: owner[:-1].clone(),
            r"lengths are torch.int32 of shape \(6,\) and not torch.int32 of \(5,\)",
        ),
        ("owner", lambda owner: owner.double(), r"owner are torch.float64"),
        ("lengths", put((1,), 17), "lengths go from .* to 17, and must be from 0 to 16"),
        ("lengths", put((1,), -3), "lengths go from -3"),
        ("positions", put((2, 1), 43), "positions go from .* to 43, and must be from 0 to 42"),
        ("positions", put((2, 1), -1), "positions go from -1"),
        ("positions", lambda positions: positions.flip(1), "columns of a layout do not grow"),
        (
            "positions",
            lambda positions: positions[:, :8].clone(),
            r"positions are .* of shape \(6, 8\) and not torch.int32 of \(6, 16\)",
        ),
    ],
)
def test_a_layout_out_of_range_or_order_is_refused(name: str, change, sentence: str, tmp_path: Path) -> None:
    path = altered(f"0.segment.0.layout.{name}", change, tmp_path / "bad.safetensors")
    with pytest.raises(CacheFileError, match=f"bad.safetensors.*{sentence}"):
        kvtailor.load_cache(build("llama"), path)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("entry", "old", "new", "sentence"),
    [
        ("layers", '"keys.size": 16', '"keys.size": 24', "keys of a kivi segment take"),
        ("layers", '"keys.group": 8', '"keys.group": 0', "groups of 0 tokens"),
        ("layers", '"keys.bits": 4', '"keys.bits": 3', "keys of a kivi segment take"),
        ("layers", '"size": 16, "start": null', '"size": 99, "start": null', "lengths go from|positions are"),
        ("layers", '"length": 9', '"length": 8', "said to hold 8 tokens, and has .9. slots"),
        ("layers", '"start": 34', '"start": 35', "holds 9 columns from 35 on, and 43 were seen"),
        ("layers", '"seen": 43', '"seen": -43', "seen of a layer is -43|differ in their rows"),
        ("layers", '"heads": 2', '"heads": 3', "has 3 kv heads, and the model 2"),
        ("layers", '"codec": "kivi"', '"codec": "nuq"', "said to be of nuq, and the plan makes kivi"),
        ("layers", '"scaling": 0.25', '"scaling": null', "scaling of a layer is None"),
        ("layers", "[{", "{", "no cache can be made from it"),
        ("layers", '"segments"', '"sigments"', "segments"),
        ("geometry", '"kv_heads": 2', '"kv_heads": 4', "kv_heads is 4 there and 2 here"),
        ("plan", "kivi", "kiwi", "kiwi"),
        ("plan", "tokens=24", "tokens=25", "means something else now"),
        ("same", "{}", '{"0.a": "0.b"}', "0.b"),
    ],
)
def test_edited_texts_are_refused_in_one_sentence(
    entry: str, old: str, new: str, sentence: str, tmp_path: Path
) -> None:
    """In a file without checksums, of which nothing else would notice."""
    with open(OLD, "rb") as file:
        about = json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"]
    assert old in about[entry]
    about[entry] = about[entry].replace(old, new, 1)
    path = tmp_path / "bad.safetensors"
    save_file(load_file(OLD), path, about)
    with pytest.raises(CacheFileError, match=f"bad.safetensors.*({sentence})"):
        kvtailor.load_cache(build("llama"), path)


def test_texts_that_were_edited_under_checksums_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    model, _, _ = saved("llama", PLANS[1], path)
    data = path.read_bytes()
    for old, new in ((b"tokens=24", b"tokens=25"), (b"kvtailor-cache-2", b"kvtailor-cache-1")):
        assert old in data
        path.write_bytes(data.replace(old, new))
        with pytest.raises(CacheFileError, match="checksum"):
            kvtailor.load_cache(model, path)


def test_a_loaded_cache_does_not_depend_on_its_file(tmp_path: Path) -> None:
    """Not on its later bytes, and not on there being any: a mapped file that becomes shorter ends the process."""
    path = tmp_path / "cache.safetensors"
    model, cache, mask = saved("llama", PLANS[0], path)
    loaded = kvtailor.load_cache(model, path)
    path.write_bytes(bytes(path.stat().st_size))
    path.write_bytes(b"")
    assert torch.equal(continued(model, loaded, mask)[0], continued(model, cache, mask)[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("most", [60, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.parametrize("plan", HOSTILE)
def test_parts_that_do_not_fit_each_other_are_refused(plan: str, most: int, tmp_path: Path) -> None:
    """Well formed, with right checksums: an emptied list of segments, a step of another dtype, a slot too few."""
    came, odd = trial(plan, tmp_path, most)
    assert not odd
    assert came["refused"] > 0.7 * sum(came.values())
