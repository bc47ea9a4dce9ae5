"""What an attention carries from call to call: it belongs to rows, and says what it takes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.contract.test_attend import every_method
from tests.support.attention_cases import SIZES, STILL, case, request_of

from kvtailor.attend.contract import Attention, IndexRequest


@every_method
@pytest.mark.parametrize("mix", ["tail", "all"])
def test_a_carry_is_tensors_of_the_batch_rows_in_storages_of_their_own(kind: type[Attention], mix: str) -> None:
    """So that it can follow reordered rows, be saved, and be charged for what it takes."""
    for method in variants_of(kind):
        prompt = case(SIZES[0], mix, 130, padded=True, seed=15)
        carries = [method.attend(request_of(prompt.query, prompt.parts, prompt.visible, 0.04, context=STILL)).carry]
        for _ in range(2):
            context = dataclasses.replace(STILL, carry=carries[-1])
            carries.append(method.index(IndexRequest(parts=prompt.parts, visible=prompt.visible, context=context)))
        one = case(SIZES[0], mix, 1, padded=True, seed=15)
        context = dataclasses.replace(STILL, carry=carries[-1])
        carries.append(method.attend(request_of(one.query, one.parts, one.visible, 0.04, context=context)).carry)
        for carry in carries:
            for name, tensor in carry.items():
                assert tensor.shape[0] == 3, name
                assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), name
        assert all(torch.equal(carries[1][name], tensor) for name, tensor in carries[2].items())


@every_method
@pytest.mark.parametrize("mix", ["moved tail", "all"])
def test_a_reordered_carry_is_the_carry_of_reordered_rows(kind: type[Attention], mix: str) -> None:
    order = torch.tensor([2, 0, 2])
    for method in variants_of(kind):
        prompt = case(SIZES[0], mix, 40, padded=True, seed=16)
        assert prompt.visible.real is not None
        picked = [part.rows(order) for part in prompt.parts]
        visible = dataclasses.replace(prompt.visible, real=prompt.visible.real[order])
        whole = method.attend(request_of(prompt.query, prompt.parts, prompt.visible, 0.04, context=STILL)).carry
        moved = method.attend(request_of(prompt.query[order], picked, visible, 0.04, context=STILL)).carry
        whole = method.index(
            IndexRequest(parts=prompt.parts, visible=prompt.visible, context=dataclasses.replace(STILL, carry=whole))
        )
        moved = method.index(
            IndexRequest(parts=picked, visible=visible, context=dataclasses.replace(STILL, carry=moved))
        )
        query, last = prompt.query[:, :, -1:], dataclasses.replace(visible, new_tokens=1, first_column=prompt.seen - 1)
        carried = {name: tensor[order] for name, tensor in whole.items()}
        carried, moved = (dataclasses.replace(STILL, carry=carry) for carry in (carried, moved))
        one = method.attend(request_of(query[order], picked, last, 0.04, context=carried))
        two = method.attend(request_of(query[order], picked, last, 0.04, context=moved))
        assert torch.allclose(one.output, two.output, atol=1e-5)
        assert (one.tokens_read is None) == (two.tokens_read is None)
        assert one.tokens_read is None or torch.equal(one.tokens_read, two.tokens_read)


def variants_of(kind: type[Attention]) -> list[Attention]:
    """A method with its defaults, with a budget that does not cover what is held, and with each of its switches on."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    small = {"tokens": 20} if "tokens" in fields else {}
    switches = [name for name, field in fields.items() if field.type in (bool, "bool")]
    return [kind(), kind(**small), *(kind(**small, **{name: True}) for name in switches)]
