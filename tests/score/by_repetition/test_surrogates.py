"""KVzap and Fast KVzip: their networks by plain loops, and what training on a tiny model gives."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.support.calibrated import tiny
from tests.support.held_rows import held_by, make_row
from tests.support.seam.zoo import build, prompts

import kvtailor
from kvtailor.bench.data.overlap import read_back
from kvtailor.calibration.contract import Job
from kvtailor.calibration.fastkvzip import FastKVzip as Gates
from kvtailor.calibration.kvzap import KVzap as Networks
from kvtailor.calibration.kvzap import ridge
from kvtailor.calibration.passages import cut
from kvtailor.calibration.teaching import Lessons, agreement
from kvtailor.errors import CalibrationError, KvtailorError
from kvtailor.hf.versions import hand_cache
from kvtailor.score.by_repetition.fastkvzip import FastKVzip
from kvtailor.score.by_repetition.kvzap import KVzap
from kvtailor.types import Held

TEXT = "".join(
    f"{['the', 'a', 'one'][i % 3]} {['cat', 'dog', 'owl', 'fox', 'hen'][i * i % 5]} {i} " for i in range(900)
)


def rows(*lengths: int) -> list:
    generator = torch.Generator().manual_seed(4)
    return [make_row(n, heads=3, group=2, size=7, generator=generator) for n in lengths]


def read_of(held: Held, row: int, head: int, token: int) -> list[float]:
    """The key turned back plane by plane, channel i with i + 2, then the value."""
    key = [float(x) for x in held.keys[row, head, token]]
    age = int(held.positions[row, head, token]) - int(held.first[row])
    for plane, frequency in enumerate(held.rotation.frequencies.tolist()):
        one, two, angle = key[plane], key[plane + 2], -age * frequency
        key[plane] = one * math.cos(angle) - two * math.sin(angle)
        key[plane + 2] = one * math.sin(angle) + two * math.cos(angle)
    return key + [float(x) for x in held.values[row, head, token]]


def zapped(read: list[float], made: dict[str, torch.Tensor], head: int) -> float:
    total = float(made["zap_out_bias"][head])
    for unit in range(32):
        x = float(made["zap_hidden_bias"][head, unit])
        x += sum(each * float(made["zap_hidden"][head, i, unit]) for i, each in enumerate(read))
        total += float(made["zap_out"][head, unit]) * x * 0.5 * (1 + math.erf(x / math.sqrt(2)))
    return 1 / (1 + math.exp(-total))


def normed(states: list[float], weight: torch.Tensor) -> list[float]:
    length = math.sqrt(sum(x * x for x in states) / len(states) + 1e-6)
    return [x / length * float(w) for x, w in zip(states, weight, strict=True)]


def gated_by_hand(read: list[float], made: dict[str, torch.Tensor], head: int) -> float:
    gate = {name: tensor[head] for name, tensor in made.items()}
    key = [sum(x * float(gate["gate_key"][i, c]) for i, x in enumerate(read)) for c in range(16)]
    key = normed(key, gate["gate_key_norm"])
    shares = []
    for query_head in range(2):
        query = [
            sum(x * float(gate["gate_query"][i, query_head, c]) for i, x in enumerate(read))
            + float(gate["gate_query_bias"][query_head, c])
            for c in range(16)
        ]
        query = normed(query, gate["gate_query_norm"])
        own = sum(a * b for a, b in zip(query, key, strict=True)) / 4 + float(gate["gate_bias"][query_head])
        sinks = [sum(a * float(b) for a, b in zip(query, sink, strict=True)) / 4 for sink in gate["gate_sinks"]]
        shares.append(1 / (1 + sum(math.exp(sink - own) for sink in sinks)))
    return sum(shares) / 2


def zapped_linearly(read: list[float], made: dict[str, torch.Tensor], head: int) -> float:
    total = sum(each * float(made["zap_linear"][head, i]) for i, each in enumerate(read))
    return 1 / (1 + math.exp(-total - float(made["zap_linear_bias"][head])))


@pytest.mark.parametrize(
    ("scorer", "by_hand"),
    [
        (KVzap(recent=3, sinks=2), zapped),
        (KVzap(recent=3, sinks=2, linear=True), zapped_linearly),
        (FastKVzip(recent=3, sinks=2), gated_by_hand),
    ],
    ids=["kvzap", "kvzap linear", "fastkvzip"],
)
def test_equals_a_plain_loop(scorer, by_hand) -> None:
    held = held_by(scorer, rows(63, 40, 5))
    scores = scorer.score(held)
    found = set()
    for row, pad in enumerate((0, 23, 58)):
        for head in range(3):
            for token in range(pad, 63, 7):
                age = token - pad
                expected = by_hand(read_of(held, row, head, token), held.calibration, head)
                expected = expected if age >= 2 else 2.0 + 2 - age
                assert scores[row, head, token].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
                found.add(round(expected, 3))
    assert len(found) > 20


@pytest.mark.parametrize("kind", [KVzap, FastKVzip])
def test_refuses_what_makes_no_sense_and_a_missing_network(kind) -> None:
    for name in ("recent", "sinks"):
        with pytest.raises(ValueError, match=f"{name} must be 0 or more tokens, found -1"):
            kind(**{name: -1})
    held = held_by(kind(), rows(9))
    object.__setattr__(held, "calibration", None)
    with pytest.raises(ValueError, match="see `kvtailor calibrate"):
        kind().score(held)


def test_the_linear_form_is_ridge_regression() -> None:
    """As least squares over the tokens and one more row for each channel, the constant left out of the penalty."""
    generator = torch.Generator().manual_seed(6)
    lessons = [
        Lessons(torch.randn(2, 3, n, 5, generator=generator).half(), torch.rand(2, 3, n, generator=generator))
        for n in (20, 11)
    ]
    made = ridge(lessons)
    for layer, head in ((0, 0), (1, 2)):
        tokens = torch.cat([each.tokens[layer, head].double() for each in lessons])
        wanted = torch.cat([each.found[layer, head].double() for each in lessons]).log()
        rows = torch.cat([torch.cat([tokens, torch.ones(31, 1)], 1), torch.cat([torch.eye(5), torch.zeros(5, 1)], 1)])
        solved = torch.linalg.lstsq(rows.double(), torch.cat([wanted, torch.zeros(5)])[:, None].double()).solution[:, 0]
        torch.testing.assert_close(made["zap_linear"][layer, head], solved[:5].float(), rtol=1e-4, atol=1e-5)
        assert float(made["zap_linear_bias"][layer, head]) == pytest.approx(float(solved[5]), rel=1e-4)


def test_a_file_of_before_has_no_linear_form() -> None:
    held = held_by(KVzap(), rows(9))
    old = {name: tensor for name, tensor in held.calibration.items() if "linear" not in name}
    object.__setattr__(held, "calibration", old)
    assert KVzap().score(held).shape == (1, 3, 9)
    with pytest.raises(ValueError, match="files of before lack"):
        KVzap(linear=True).score(held)


def test_agreement_by_hand() -> None:
    found = torch.tensor([[[8.0, 7, 6, 5, 4, 3, 2, 1]]])
    assert agreement(found, found) == 1.0
    assert agreement(torch.tensor([[[8.0, 0, 7, 0, 0, 0, 0, 0]]]), found) == 0.5


@pytest.mark.parametrize(
    ("maker", "kind", "teacher"), [(Networks, "kvzap", "kvzip_plus"), (Gates, "fastkvzip", "kvzip")]
)
def test_training_lowers_the_loss_and_agrees_with_the_teacher(maker, kind: str, teacher: str, tmp_path: Path) -> None:
    """On a tiny sharpened model and passages that were held out. The file is of that model, and of no other."""
    subject, told = tiny(), []
    job = Job(
        subject=subject,
        passages=cut(subject, {"t": TEXT}, tokens=768, context=64),
        context=64,
        count=12,
        state=0,
        advance=told.append,
        draft=lambda tensors: "",
    )
    made = maker(steps=300).measure(job)
    assert len(told) == maker(steps=300).units(12) == 12 + 6
    facts = made.facts["held_out"]
    assert facts["passages"] == 3 and facts["teacher"] == teacher
    assert facts["loss"]["after"] < facts["loss"]["before"]
    assert min(facts["agreement"]) > 0.3, facts["agreement"]
    assert f"quarter of tokens that {teacher} keeps" in made.facts["verdict"]
    if kind == "kvzap":
        assert "the linear form keeps" in made.facts["verdict"]
        assert made.facts["linear"]["loss"]["after"] < made.facts["linear"]["loss"]["before"]


@pytest.mark.parametrize("kind", ["kvzap", "fastkvzip"])
def test_a_file_says_what_it_learned_from_and_serves_its_model_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_kind = {"kvzap": Networks, "fastkvzip": Gates}[kind]
    monkeypatch.setattr("kvtailor.calibration.run.calibrator", lambda name: of_kind(steps=5))
    subject = tiny()
    out = tmp_path / "n.safetensors"
    made = kvtailor.calibrate(subject, kind, {"my text": TEXT}, out=out, tokens=512, context=64)
    assert made.texts == ("my text",) and read_back(made.metadata)[0].text_name == "my text"
    ids, mask = prompts((40, 23))
    plan = f"{kind}(file='{out}', recent=4) @ tokens=12"
    cache = kvtailor.cache_for(subject.model, plan)
    subject.model(ids, attention_mask=mask, **hand_cache(cache))
    assert cache.held().double().mean() == 12
    with pytest.raises(CalibrationError, match="other weights of the same shapes"):
        kvtailor.cache_for(build("llama", state=1), plan)
    with pytest.raises(KvtailorError, match="no file is named"):
        kvtailor.cache_for(subject.model, f"{kind} @ tokens=12")
