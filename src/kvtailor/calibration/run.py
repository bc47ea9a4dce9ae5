"""`kvtailor.calibrate`: one kind, one model, some texts, one file."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from kvtailor.bench.data.overlap import Calibrated, written
from kvtailor.bench.subject import Subject
from kvtailor.calibration.contract import Calibrator, Job, Made, calibrator
from kvtailor.calibration.passages import Passage, cut
from kvtailor.calibration_file import Calibration, Shapes, read, write
from kvtailor.errors import CalibrationError
from kvtailor.hf.attention import NAME
from kvtailor.hf.model.fingerprint import turns_of, weight_fingerprint
from kvtailor.hf.model.geometry import Geometry, check
from kvtailor.hf.model.tensor_parallel import RankHeads, share_of
from kvtailor.plan.calls import check_call
from kvtailor.version import __version__

__all__ = ["calibrate", "head_of", "subject_of"]

Watched = AbstractContextManager[Callable[[str], None]]

# Hashes of 13 words that a file keeps of each text: 32 KiB, from which a share of 1 % is known within 0.2 points.
_SKETCH = 4096


@check_call
def calibrate(
    model: str | Path | Subject | Any,
    kind: str,
    texts: Mapping[str, str] | None = None,
    *,
    out: str | os.PathLike[str],
    tokenizer: Any = None,
    tokens: int | None = None,
    context: int | None = None,
    state: int = 0,
    again: bool = False,
    name: str | None = None,
    progress: Callable[[int], Watched] = lambda units: nullcontext(lambda what: None),
) -> Calibration:
    """Measures what a method needs of a model, and writes it to a file with its provenance.

    ```python
    kvtailor.calibrate("demo", "qfilters", {"my text": text}, out="filters.safetensors")
    cache = kvtailor.cache_for(model, "qfilters(file=filters.safetensors) @ keep=0.25")
    ```

    Args:
        model: "demo", a folder, a hub name, a model, or a `bench.subject.Subject`. Use the dtype that will be
            compressed; the file also has the fingerprints of the same weights rounded to bfloat16 and to float16.
        kind: one of `kvtailor.calibration.contract.kinds()`.
        texts: by name; what a plan is evaluated on later must not be among them, and the bench sees to that.
        out: the file to write.
        tokenizer: of a model that is given as such.
        tokens: of the texts together; None: what the kind uses.
        context: tokens of a passage; None: what the kind uses, or the model's positions where they are fewer.
        state: random state of what the kind draws.
        again: replace a file that is there.
        name: of the model, for the file; None: the name that it was loaded by.
        progress: from a number of units of work to a context that gives what is called after each with its label.

    Raises:
        UnknownName: there is no such kind.
        CalibrationError: `out` is there already, cannot be written, or the kind needs texts and has none.
        KvtailorError: the model cannot be loaded or compressed, or the texts are too short.
    """
    maker, target = calibrator(kind), Path(out).expanduser()
    if target.exists() and not again:
        raise CalibrationError(
            f"{target} is there already: give another file, or ask for it again (again=True, --again)"
        )
    if not target.parent.is_dir():
        raise CalibrationError(f"asked to write {target}, and there is no folder {target.parent}: make it first")
    if maker.reads_text and not texts:
        raise CalibrationError(f"a calibration of kind {kind} is measured on text, and none was given: give some")
    if texts and not maker.reads_text:
        raise CalibrationError(
            f"a calibration of kind {kind} reads no text, and {', '.join(texts)} was given: leave it out"
        )
    subject = subject_of(model, tokenizer, name)
    check(subject.model, NAME)
    geometry = Geometry.of(subject.model.config)
    if geometry.has_latents:
        raise CalibrationError(
            f"a calibration is measured on the keys and values of each kv head, and layers of this "
            f"{geometry.model_type} hold one latent for all heads (multi-head latent attention): use methods that need "
            "none"
        )
    share = share_of(subject.model, geometry)
    if isinstance(share, RankHeads):
        raise CalibrationError(
            f"a calibration is measured on a model in one process, and {share.processes} share this one: load it "
            "without a tp_plan. The file then serves any number of processes"
        )
    if subject.tokenizer is None:
        raise CalibrationError("asked for a calibration of a model object without its tokenizer: give tokenizer=")
    length = _context(maker, subject, context)
    wanted = maker.tokens if tokens is None else tokens
    passages = cut(subject, texts or {}, tokens=wanted, context=length) if maker.reads_text else ()
    count = len(passages) if maker.reads_text else max(1, wanted // length)
    head = head_of(
        kind,
        subject,
        {
            "tokens": count * length,
            "passages": count,
            "context": length,
            "state": state,
            "command": _command(kind, subject, list(texts or {}), wanted, length, state, target.name),
        },
    )
    with TemporaryDirectory(prefix="kvtailor-") as folder:

        def draft(tensors: Mapping[str, Tensor]) -> str:
            path = Path(folder) / f"{kind}.safetensors"
            write(path, tensors, {**head, "facts": "{}", **written(())})
            return str(path)

        try:
            with progress(maker.units(count)) as advance:
                made = maker.measure(
                    Job(
                        subject=subject,
                        passages=passages,
                        context=length,
                        count=count,
                        state=state,
                        advance=advance,
                        draft=draft,
                    )
                )
        finally:
            if subject.stock_attention is not None:
                subject.model.set_attn_implementation(subject.stock_attention)
    provenance = _provenance(target.name, subject.name, texts or {}, passages, made)
    write(target, made.tensors, {**head, "facts": json.dumps(dict(made.facts)), **written(provenance)})
    return read(str(target), kind, "what was just written")


def head_of(kind: str, subject: Subject, made: Mapping[str, Any]) -> dict[str, str]:
    """What a file of a kind says of its model, and how it was made: `made`, and what is the same for all."""
    same = {
        "dtype": str(subject.dtype).removeprefix("torch."),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "kvtailor": __version__,
        "torch": torch.__version__,
        "rotary": turns_of(subject.model),
    }
    return {
        "kind": kind,
        "model": subject.name,
        "fingerprints": json.dumps(_fingerprints(subject)),
        "shapes": json.dumps(asdict(_shapes(subject))),
        "made": json.dumps({**made, **same}),
    }


def _fingerprints(subject: Subject) -> list[str]:
    """Of the weights as they are, and as they would be in smaller dtypes; each once."""
    found = (weight_fingerprint(subject.model, dtype) for dtype in (None, torch.bfloat16, torch.float16))
    told = list(dict.fromkeys(each for each in found if each is not None))
    if not told:
        raise CalibrationError(
            f"the weights of {subject.name} cannot all be read (some are nowhere in memory, or packed for this CPU), "
            "so a file could not say which weights it is for: load the model anew, without what packs or moves them"
        )
    return told


def _shapes(subject: Subject) -> Shapes:
    geometry = Geometry.of(subject.model.config)
    return Shapes(
        layers=len(geometry.compressed),
        q_heads=geometry.q_heads,
        kv_heads=geometry.kv_heads,
        head_size=geometry.head_dim,
    )


def subject_of(model: Any, tokenizer: Any = None, name: str | None = None) -> Subject:
    """What `calibrate` was given as `model`."""
    if isinstance(model, Subject):
        return model
    if isinstance(model, str | os.PathLike):
        return Subject.load(os.fspath(model))
    known = name or str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return Subject(name=known, model=model, tokenizer=tokenizer)


def _context(maker: Calibrator, subject: Subject, asked: int | None) -> int:
    if asked is None:
        return maker.context if subject.positions is None else min(maker.context, subject.positions)
    if asked < 2 or (subject.positions is not None and asked > subject.positions):
        raise CalibrationError(
            f"asked for passages of {asked} tokens: give at least 2, and at most the {subject.positions} positions of "
            f"{subject.name}"
        )
    return asked


def _provenance(
    file: str, model: str, texts: Mapping[str, str], passages: tuple[Passage, ...], made: Made
) -> list[Calibrated]:
    found = []
    for text_name, text in texts.items():
        used = [passage.text for passage in passages if passage.source == text_name]
        found.append(Calibrated.on(text, name=file, model=model, text_name=text_name, used=used, largest=_SKETCH))
    for text_name, text in made.texts.items():
        found.append(Calibrated.on(text, name=file, model=model, text_name=text_name, largest=_SKETCH))
    return found


def _command(kind: str, subject: Subject, texts: list[str], tokens: int, context: int, state: int, out: str) -> str:
    """The command line that makes the file again, from where its texts lie."""
    words = ["kvtailor", "calibrate", kind, "--model", subject.name]
    words += ["--dtype", str(subject.dtype).removeprefix("torch.")]
    if subject.cache_dtype is not subject.dtype:
        words += ["--cache-dtype", str(subject.cache_dtype).removeprefix("torch.")]
    for text in texts:
        words += ["--text", text]
    return shlex.join([*words, "--tokens", str(tokens), "--context", str(context), "--state", str(state), "--out", out])
