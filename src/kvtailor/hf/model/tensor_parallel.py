"""Models whose kv heads lie on several processes: transformers' tensor parallelism, as torchrun starts it.

transformers shards the projections of an attention module (`tp_plan`), so that each process (rank) computes some of the
heads. A family whose projections are gathered again before the heads (Phi-3, OLMo 2) has all heads on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kvtailor.errors import KvtailorError, PlanError, UnsupportedModel
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.model.modules import attention_modules
from kvtailor.method import Method
from kvtailor.plan import Plan
from kvtailor.plan.arguments import with_nested
from kvtailor.plan.registry import name_of
from kvtailor.types import ALL_HEADS, HeadShare

__all__ = [
    "RankHeads",
    "fail_together",
    "check_plan",
    "check_same_plan",
    "gather_objects",
    "share_of",
    "broadcast_from_first",
]

_T = TypeVar("_T")
# Styles of transformers' plans that leave each rank its own heads, and those that give every rank all of them.
_OWN_HEADS = frozenset({"colwise", "packed_colwise", "local_colwise", "local_packed_colwise"})
_ALL_HEADS = frozenset({"colwise_gather_output", "colwise_rep", "replicate", "replicated_with_grad_allreduce"})
# Names of the modules that make queries, keys and values.
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv")


class RankHeads(HeadShare):
    """The heads of one process of a tensor-parallel group.

    Args:
        group: torch's process group.
        shards_heads: each process has its own heads; False: every one has all of them.

    Attributes:
        group: see above.
        process: number of this process in the group.
        processes: how many there are; `ranks` are as many where the heads are shared among them, else 1.
    """

    def __init__(self, group: Any, *, shards_heads: bool):
        self.group = group
        self.process, self.processes = dist.get_rank(group), dist.get_world_size(group)
        self.rank, self.ranks = (self.process, self.processes) if shards_heads else (0, 1)

    def __repr__(self) -> str:
        return f"RankHeads(process={self.process}, processes={self.processes}, ranks={self.ranks})"

    def _of_all(self, tensor: Tensor) -> Sequence[Tensor]:
        # The group's backend decides where tensors meet: NCCL's on the GPU, gloo's on the CPU.
        own = tensor.detach().to(self._device(tensor.device)).contiguous()
        # gloo knows no bool, and no two backends the same small types.
        sent = own.to(torch.uint8) if own.dtype == torch.bool else own
        found = [torch.empty_like(sent) for _ in range(self.processes)]
        dist.all_gather(found, sent, group=self.group)
        return [each.to(device=tensor.device, dtype=tensor.dtype) for each in found]

    def _device(self, own: torch.device) -> torch.device:
        if dist.get_backend(self.group) == dist.Backend.NCCL:
            return own if own.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def share_of(model: Any, geometry: Geometry) -> HeadShare:
    """Return which kv heads of a model this process holds.

    Raises:
        UnsupportedModel: the heads do not divide among the processes, the layers lie on several processes (pipeline
            parallelism), or it cannot be told which heads are where.
    """
    name, mesh = geometry.model_type, getattr(model, "_device_mesh", None)
    if mesh is None:
        return ALL_HEADS
    sizes = dict(zip(mesh.mesh_dim_names or ("tp",), mesh.shape, strict=True))
    if sizes.get("pp", 1) > 1:
        raise UnsupportedModel(
            f"the layers of this {name} lie on {sizes['pp']} processes (pipeline parallelism), and a cache of kvtailor "
            "has all layers in one; kvtailor supports tensor parallelism (tp_plan) and device_map"
        )
    processes = sizes.get("tp", 1)
    if processes == 1:
        return ALL_HEADS
    if geometry.has_states or geometry.readers or not geometry.alike:
        what = "keep states" if geometry.has_states else "share keys" if geometry.readers else "differ in their heads"
        raise UnsupportedModel(
            f"this {name} has layers that {what}, and kvtailor does not support such models on {processes} processes "
            "yet: load it in one, or with a device_map"
        )
    if geometry.has_latents:
        raise UnsupportedModel(
            f"this {name} has layers that keep one latent for all heads, which {processes} processes cannot share by "
            "heads: load it in one process, or with a device_map"
        )
    shards_heads = _shards_heads(model, name)
    for shape in geometry.shapes if shards_heads else ():
        if shape.kv_heads % processes or shape.q_heads % processes:
            raise UnsupportedModel(
                f"this {name} has {shape.kv_heads} kv heads and {shape.q_heads} query heads, which {processes} "
                "processes cannot share evenly: start torchrun with a number of processes that divides "
                f"{shape.kv_heads}"
            )
    return RankHeads((mesh["tp"] if mesh.mesh_dim_names else mesh).get_group(), shards_heads=shards_heads)


def check_plan(plan: Plan, geometry: Geometry, share: HeadShare) -> None:
    """Raise where a plan's methods cannot work on the heads of one process.

    Raises:
        PlanError: with a sentence for each method.
    """
    if share.ranks == 1:
        return
    faults = []
    for part in plan.parts.values():
        for method in with_nested(part):
            faults += _faults(method, geometry.kv_heads // share.ranks, share.ranks)
    if faults:
        raise PlanError(str(plan), list(dict.fromkeys(faults)))


def check_same_plan(plan: Plan, share: HeadShare) -> None:
    """Raise on all processes that share a model where their plans differ; collective.

    Raises:
        PlanError: with two of the plans.
    """
    if not isinstance(share, RankHeads):
        return
    told = gather_objects(share, (plan.hash, str(plan)))
    other = next((process for process, (hash_, _) in enumerate(told) if hash_ != told[0][0]), None)
    if other is not None:
        first, another = told[0][1], told[other][1]
        sentence = f"processes that share a model need one plan: process 0 has {first!r}, process {other} {another!r}"
        raise PlanError(str(plan), [sentence])


@contextmanager
def fail_together(share: HeadShare, kind: type[KvtailorError]) -> Iterator[None]:
    """Let all processes of a group fail where one does: none goes on to wait for it. Collective at its end.

    Args:
        share: of the processes.
        kind: of the error that those get which had none.

    Raises:
        KvtailorError: this process's own; or one of `kind` with the sentence of the first process that had one.
    """
    own: KvtailorError | None = None
    try:
        yield
    except KvtailorError as error:
        if not isinstance(share, RankHeads):
            raise
        own = error
    if not isinstance(share, RankHeads):
        return
    told = gather_objects(share, None if own is None else str(own))
    if own is not None:
        raise own
    for process, sentence in enumerate(told):
        if sentence is not None:
            raise kind(f"process {process} of {share.processes}: {sentence}")


def gather_objects(share: RankHeads, value: _T) -> list[_T]:
    """Return the values of all processes of the group, in their order; collective."""
    told: list[Any] = [None] * share.processes
    dist.all_gather_object(told, value, group=share.group)
    return told


def broadcast_from_first(share: RankHeads, text: str) -> str:
    """Return the text that the first process of the group gave; collective."""
    return gather_objects(share, text)[0]


def _faults(method: Method, heads: int, ranks: int) -> list[str]:
    if not method.capabilities.split_heads:
        return [
            f"{name_of(method)} does not declare that it works where the kv heads of a layer lie on {ranks} processes: "
            "set serves = Serves(split_heads=True) in its class, if a head's result depends on that head alone"
        ]
    sentence = method.split_refusal(heads=heads, ranks=ranks)
    return [] if sentence is None else [sentence]


def _shards_heads(model: Any, name: str) -> bool:
    """Whether each process computes its own heads, by the styles of the plan that the model was sharded with."""
    modules = {id(module) for module in attention_modules(model)}
    styles = set()
    plan = getattr(model, "tp_plan", None) or {}
    for path, module in model.named_modules():
        if id(module) in modules:
            for own, _ in module.named_children():
                if own in _PROJECTIONS:
                    styles.add(_style(plan, f"{path}.{own}"))
    if styles and styles <= _OWN_HEADS:
        return True
    if styles and styles <= _ALL_HEADS | {None}:
        return False
    raise UnsupportedModel(
        f"the attention of this {name} is sharded as {', '.join(sorted(map(str, styles))) or 'nothing that is known'}, "
        "and kvtailor cannot tell which kv heads each process has"
    )


def _style(plan: Any, path: str) -> str | None:
    """The style of a module in a plan whose paths have '*' for a layer's number."""
    wildcard = ".".join("*" if part.isdigit() else part for part in path.split("."))
    for pattern, style in plan.items():
        if wildcard == pattern or wildcard.endswith(f".{pattern}"):
            return str(style)
    return None
