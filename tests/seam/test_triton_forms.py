"""A whole model through the kernels of GPUs: prompt and decoding give the logits that the plain forms give.

Without a GPU the kernels run in Triton's interpreter, in which tensors of the CPU count as those of a GPU.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

import kvtailor
from kvtailor.hf.versions import hand_cache
from kvtailor.ops.dispatch import using
from tests.ops.gpu.exact_attention import DEVICE, needs_triton
from tests.support.seam.zoo import VOCABULARY, build, error, prompts

pytestmark = needs_triton

READ = {"split_kernel", "merge_kernel"}
PACK = {"token_kernel", "channel_kernel"}
PAGED = "quest(tokens=12, least=1, dense_layers=1) + indexed(page=4, block_size=8)"
# The plan below that has both asks the same of them.
BOTH = pytest.mark.long
# The interpreter takes seconds for each; `tests/ops/gpu` asks the same of the kernels alone.
SLOW = pytest.mark.long
# A plan, lengths of prompts, what must have run, and how far the logits may be off: where codes are read, queries and
# weights are rounded.
CASES = [
    ("full", (33, 20), READ, 1e-5),
    ("kivi(bits=4, group=16, recent=16)", (33, 20), {*READ, *PACK}, 1e-2),
    (
        "by_layer(of=[sides(keys=vector(bits=8, block_size=16), values=kivi(bits=8, group=8, recent=16))])",
        (33, 20),
        {*READ, "token_kernel"},
        1e-2,
    ),
    pytest.param("vector(bits=8, recent=4, block_size=8)", (33,), {*READ, "token_kernel"}, 1e-2, marks=SLOW),
    pytest.param("hadamard(of=gaussian(bits=4, recent=4, block_size=8), signs=0)", (33, 20), READ, 1e-2, marks=SLOW),
    pytest.param("hadamard(of=higgs(bits=4, recent=4, block_size=8), signs=0)", (33,), READ, 1e-2, marks=SLOW),
    pytest.param("nvfp4(group=8, recent=4, block_size=8)", (33,), READ, 1e-2, marks=SLOW),
    pytest.param(PAGED, (33, 20), {*READ, "pages"}, 1e-5, marks=BOTH),
    pytest.param("snapkv(window=6) + adakv @ tokens=24", (33, 20), READ, 1e-5, marks=BOTH),
    (f"snapkv(window=6) + adakv + {PAGED} @ tokens=24", (33, 29), {*READ, "pages"}, 1e-5),
    # The mass of a long prompt has a kernel where nothing is padded, and so has that of a few tokens.
    pytest.param("h2o(recent=4) + adakv @ tokens=24", (66,), {*READ, "mass_kernel", "prompt"}, 1e-5, marks=SLOW),
    pytest.param("h2o(recent=4) + adakv @ tokens=24", (66, 64), {*READ, "mass_kernel"}, 1e-5, marks=SLOW),
    ("h2o(recent=4) + kivi(bits=4, group=16, recent=16) @ tokens=40", (33,), {*READ, *PACK, "mass_kernel"}, 1e-2),
]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel was launched, and how often over pages and for the mass of a prompt."""
    from kvtailor.ops.attention.triton.kernels.mass import mass_kernel
    from kvtailor.ops.triton_launch import Launch

    count: Counter[str] = Counter()
    launch = Launch.__call__

    def counted(call: Launch) -> None:
        count[call.kernel.fn.__name__] += 1
        count["prompt"] += bool(call.kernel is mass_kernel and call.arguments["CAUSAL"])
        count["pages"] += call.arguments.get("PAGES") is not None
        launch(call)

    monkeypatch.setattr(Launch, "__call__", counted)
    return count


@torch.no_grad()
def logits(plan: str, which: str, lengths: tuple[int, ...]) -> Tensor:
    """Of a prompt, two new tokens at once and then one, (b, 4, v)."""
    # Where the first layer is read whole, the second is the one in question.
    model = build("llama", layers=2 if "dense_layers" in plan else 1).to(DEVICE)
    ids, mask = (each.to(DEVICE) for each in prompts(lengths))
    cache = kvtailor.cache_for(model, plan)
    fed = torch.randint(3, VOCABULARY, (len(lengths), 3), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    found = []
    with using(which):
        found.append(model(ids, attention_mask=mask, **hand_cache(cache)).logits[:, -1:])
        for new in (fed[:, :2], fed[:, 2:]):
            mask = torch.cat([mask, torch.ones_like(new)], 1)
            positions = (mask.cumsum(-1) - 1)[:, -new.shape[1] :]
            found.append(model(new, attention_mask=mask, position_ids=positions, **hand_cache(cache)).logits)
    return torch.cat(found, 1).float()


@pytest.mark.parametrize(("plan", "lengths", "wanted", "allowed"), CASES)
def test_gives_the_logits_of_the_plain_forms(
    plan: str, lengths: tuple[int, ...], wanted: set[str], allowed: float, launched: Counter[str]
) -> None:
    expected = logits(plan, "reference", lengths)
    assert not launched
    found = logits(plan, "triton", lengths)
    # On a GPU torch's kernel before the sums takes 16 bits alone.
    wanted = wanted - {"prompt"} if DEVICE == "cuda" else wanted
    assert {name for name, times in launched.items() if times} == wanted
    assert error(found, expected) < allowed
