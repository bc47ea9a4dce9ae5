"""Timing loops of single operations, each against what a user would run instead.

    python -m benchmarks.micro NAME [OPTIONS]    # decode, kernels, batches, link, pages, builtins, host, whole
    python -m benchmarks.micro NAME --help

Each module of a name says in its first lines what it asks. The last line is one JSON object.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from benchmarks.micro.cells import measure_cells
from kvtailor.cli import RefusingGroup
from kvtailor.cli.machine_share import share_machine

__all__ = ["micro"]

_F = TypeVar("_F", bound=Callable[..., Any])
_LIST = "Numbers with ',' between."


def _numbers(text: str, kind: Callable[[str], Any], option: str) -> tuple[Any, ...]:
    """The values of an option that takes several.

    Raises:
        click.UsageError: something else stands there.
    """
    try:
        return tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise click.UsageError(f"{option} is {text!r}: give numbers with ',' between.") from error


class _OneOfSeveral(click.Command):
    """A command whose error lists its options where it gets another command's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            mine = [option for each in self.params for option in each.opts if option.startswith("--")]
            raise click.UsageError(
                f"{error.option_name} is not for {self.name}: {', '.join(mine)} are.", ctx
            ) from error


class _Benches(RefusingGroup):
    """Its commands in the order of their definition."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(name="micro", cls=_Benches, context_settings={"help_option_names": ["-h", "--help"]})
def micro() -> None:
    """Time single operations against what a user would run instead: in turns, in one process, with medians and spread.

    What no time can beat, reading the bytes once at this machine's bandwidth, stands beside each time. Samples during
    which other programs took processor time are left out and counted.
    """


def _common(function: _F, *, threads: str = "as many as torch takes") -> _F:
    """The options of every micro bench; `threads` are those without the option."""
    for option in (
        click.option("--threads", type=click.IntRange(1), help=f"Of torch.  [{threads}]"),
        click.option("--device", default="cpu", show_default=True, help="Such as cpu or cuda."),
    ):
        function = option(function)
    return function


def _list(name: str, default: str, what: str, *, kind: Callable[[str], Any] = int) -> Callable[[_F], _F]:
    """An option that takes several; '' is none of them."""

    def read(ctx: click.Context, option: click.Parameter, text: str | None) -> tuple[Any, ...] | None:
        found = None if text is None else _numbers(text, kind, f"--{name}") if text.strip() else ()
        if small := [each for each in found or () if isinstance(each, int) and each < 1]:
            raise click.UsageError(f"--{name} has {', '.join(map(str, small))}: give numbers of at least 1.")
        return found

    shown = bool(default)
    return click.option(f"--{name}", default=default or None, show_default=shown, callback=read, help=what)


def _one_of(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.strip() not in names:
            raise click.UsageError(f"{text.strip()!r} is none of {', '.join(names)}.")
        return text.strip()

    return read


def _rounds(default: int, name: str = "rounds", what: str = "Timed rounds.") -> Callable[[_F], _F]:
    return click.option(f"--{name}", type=click.IntRange(1), default=default, show_default=True, help=what)


_DTYPES = _one_of("float32", "bfloat16")
# Plain, and a hybrid of which one layer in four attends: names of `hf.model.config.RANDOM_SHAPES`.
_MODELS = ("random-llama-gqa", "random-qwen3-next")
# Of real widths, and small ones to try it out.
_LARGE = ("random-llama3-8b", "random-llama2-7b", "random-llama-gqa", "random-llama-narrow", "random-llama")
_FORMS = ("auto", "reference", "triton")
_DTYPE = click.Choice(["float32", "bfloat16", "float16"])


@micro.command(cls=_OneOfSeveral, short_help="A token and a prompt, against others' caches.")
@_list("dtype", "float32,bfloat16", "Of model and cache, with ',' between.", kind=_DTYPES)
@_list("contexts", "8192,32768", "Tokens held when a token is decoded, with ',' between; '' for none.")
@_list("prefill", "8192", "Tokens of prompts, with ',' between; '' for none.")
@_rounds(15)
@_rounds(3, "prefill-rounds", "Timed rounds of prompts.")
@click.option(
    "--model", type=click.Choice(_MODELS), default=_MODELS[0], show_default=True, help="Untrained; its shape."
)
@click.option("--layers", type=click.IntRange(1), help=f"Of {_MODELS[0]}.  [as many as it has]")
@_common
def decode(
    dtype: tuple[str, ...],
    contexts: tuple[int, ...],
    prefill: tuple[int, ...],
    rounds: int,
    prefill_rounds: int,
    model: str,
    layers: int | None,
    **common: Any,
) -> None:
    """Time a decoded token and a prefill of a random model, with our caches and with transformers' own.

    Decoding is divided by transformers' StaticCache with sdpa, its fastest; DynamicCache, its default, stands beside.
    """
    from benchmarks.micro.decode import bench

    if layers is not None and model != _MODELS[0]:
        raise click.UsageError(f"--layers is for {_MODELS[0]}: the layers of {model} are of several kinds.")
    measure_cells(
        lambda device: bench(
            dtypes=dtype,
            contexts=contexts,
            prefills=prefill,
            rounds=rounds,
            prefill_rounds=prefill_rounds,
            device=device,
            model=model,
            layers=layers,
        ),
        **common,
    )


@micro.command(cls=_OneOfSeveral, short_help="Attention, against torch's and transformers'.")
@_list("contexts", "", "Tokens held, with ',' between.  [8192,32768; on a GPU 4096,32768,131072]")
@_list("batches", "1", "Rows of the attention tables, with ',' between.")
@_list("cases", "", "attention, quest, ragged, blocks, levels, appending, packing; with ',' between.  [all]", kind=str)
@_rounds(11)
@_common
def kernels(
    contexts: tuple[int, ...] | None,
    batches: tuple[int, ...],
    cases: tuple[str, ...] | None,
    rounds: int,
    **common: Any,
) -> None:
    """Time one layer's attention over stored bytes alone: our kernels, torch's attention, transformers' caches.

    A plain read of as many bytes runs in the same rounds. A kernel whose answer is off gets no time.
    """
    from benchmarks.micro.kernels import CASES, bench

    only = tuple(_one_of(*CASES)(case) for case in cases or ())
    measure_cells(
        lambda device: bench(contexts=contexts, batches=batches, only=only, rounds=rounds, device=device), **common
    )


@micro.command(cls=_OneOfSeveral, short_help="A token of many rows, padded too.")
@_list("batches", "8,32", "Rows, with ',' between.")
@_list("contexts", "4096,16384", "Tokens of each row, with ',' between.")
@_rounds(9)
@click.option("--dtype", type=_DTYPE, default="bfloat16", show_default=True, help="Of model and cache.")
@_common
def batches(
    batches: tuple[int, ...] | None, contexts: tuple[int, ...] | None, rounds: int, dtype: str, **common: Any
) -> None:
    """Time a decoded token of a whole batch: rows and heads that are as long, ragged heads, padded rows.

    Divided by transformers' StaticCache with sdpa. Tokens per second for each GiB of cache stand beside. A batch whose
    caches have no room is left out and named.
    """
    from benchmarks.micro.batches import bench

    measure_cells(
        lambda device: bench(batches=batches or (), contexts=contexts or (), rounds=rounds, dtype=dtype, device=device),
        **common,
    )


@micro.command(cls=_OneOfSeveral, short_help="A token over a tier, against a bare read.")
@_list("contexts", "8192", "Tokens held, with ',' between.")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="On the disk to measure.  [the system's folder for such files]"
)
@_rounds(7)
@_common
def link(contexts: tuple[int, ...], folder: Path | None, rounds: int, **common: Any) -> None:
    """Time a decoded token whose cache lives on a disk (on a GPU: in host memory), beside a bare read of its bytes."""
    from benchmarks.micro.link import bench

    measure_cells(lambda device: bench(contexts=contexts, rounds=rounds, folder=folder, device=device), **common)


@micro.command(cls=_OneOfSeveral, short_help="A token, in small and in huge pages.")
@_list("dtype", "bfloat16", "Of model and cache, with ',' between.", kind=_DTYPES)
@_list("contexts", "32768", "Tokens held when a token is decoded, with ',' between.")
@_rounds(15)
@_common
def pages(dtype: tuple[str, ...], contexts: tuple[int, ...], rounds: int, **common: Any) -> None:
    """Time a decoded token with every cache in small pages and in huge pages, transformers' StaticCache as well.

    Only where the system gives huge pages to programs that ask for them (docs/kernels.md).
    """
    from benchmarks.micro.pages import bench

    measure_cells(lambda device: bench(dtypes=dtype, contexts=contexts, rounds=rounds, device=device), **common)


@micro.command(cls=_OneOfSeveral, short_help="Codes, against transformers' QuantizedCache.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", show_default=True)
@_list("contexts", "8192,32768", "Tokens held when a token is decoded, with ',' between; '' for none.")
@_list("packing", "8192", "Tokens of prompts, with ',' between; '' for none.")
@_list("bits", "4,2", "Of codes, with ',' between.")
@_list("backends", "quanto,hqq", "Of QuantizedCache, with ',' between; '' for none.", kind=_one_of("quanto", "hqq"))
@_rounds(9)
@_rounds(3, "packing-rounds", "Timed rounds of prompts.")
@click.option(
    "--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A text file.  [a generated text]"
)
@click.option("--windows", type=click.IntRange(0), default=20, show_default=True, help="Of the text; 0: no quality.")
@click.option("--context", type=click.IntRange(1), default=1024, show_default=True, help="Tokens compressed.")
@click.option(
    "--continuation", type=click.IntRange(2), default=256, show_default=True, help="Tokens scored after them."
)
@_common
def builtins(
    packing: tuple[int, ...],
    packing_rounds: int,
    bits: tuple[int, ...],
    device: str,
    threads: int | None,
    **given: Any,
) -> None:
    """Compare our kivi codec with transformers' QuantizedCache: a decoded token, packing a prompt, and nats lost."""
    from benchmarks.micro.builtins import bench

    unknown = [b for b in bits if b not in (4, 2)]
    if unknown:
        raise click.UsageError(f"--bits has {unknown[0]}: QuantizedCache has 4 and 2.")
    measure_cells(
        lambda where: bench(packings=packing, packing_rounds=packing_rounds, bits=bits, device=where, **given),
        device=device,
        threads=threads,
    )


@micro.command(cls=_OneOfSeveral, short_help="What the host takes for a token of each plan.")
@click.option(
    "--plans",
    "--plan",
    "plans",
    multiple=True,
    help="A plan, or several with ';' between; may be given again.  [every preset, and some combinations]",
)
@_rounds(50, what="Timed tokens of each plan.")
@click.option(
    "--profile",
    is_flag=False,
    flag_value="each",
    metavar="[PLAN]",
    help="Show the time by function too: of this plan, or without one of each.",
)
@partial(_common, threads="1 on a CPU")
def host(plans: tuple[str, ...], rounds: int, profile: str | None, threads: int | None, **common: Any) -> None:
    """Time what the host does for a decoded token: Python and launched operations, with almost no arithmetic.

    Divided by transformers' DynamicCache with sdpa. Every preset is there, with a budget of half of the prompt where it
    evicts; one that cannot be run is named with the reason.
    """
    from benchmarks.micro import host as case

    asked = [plan.strip() for each in plans for plan in each.split(";") if plan.strip()]
    if plans and not asked:
        raise click.UsageError("--plans names no plan.")
    measure_cells(
        lambda device: case.bench(plans=asked or case.plans(), rounds=rounds, profile=profile, device=device),
        threads=threads,
        threads_on_cpu=1,
        **common,
    )


@micro.command(cls=_OneOfSeveral, short_help="A large model, with and without CUDA graphs.")
@_list("contexts", "8192", "Tokens held when tokens are decoded, with ',' between; '' for none.")
@_list("batches", "1", "Rows of decoded tokens, with ',' between.")
@_list("prefill", "", "Tokens of prompts, with ',' between.  [none]")
@click.option("--plans", "--plan", "plans", multiple=True, help="A plan, or several with ';' between.  [five]")
@_list("implementations", "", "auto, reference, triton.  [auto; on a GPU the others]", kind=_one_of(*_FORMS))
@click.option("--graphs", type=click.Choice(["none", "both", "only"]), help="Replay steps.  [none; on a GPU both]")
@click.option("--own/--no-own", default=True, help="Time DynamicCache too, on a second model.  [yes]")
@_rounds(128, "tokens", "Tokens of a sample.")
@_rounds(5)
@_rounds(3, "prefill-rounds", "Timed rounds of prompts.")
@click.option("--dtype", type=_DTYPE, help="Of model and cache.  [float32; on a GPU bfloat16]")
@click.option(
    "--model",
    type=click.Choice(_LARGE),
    default=_LARGE[0],
    show_default=True,
    metavar="NAME",
    help=f"Untrained; its shape: {', '.join(_LARGE)}.",
)
@_common
def whole(
    contexts: tuple[int, ...] | None,
    prefill: tuple[int, ...] | None,
    plans: tuple[str, ...],
    dtype: str | None,
    **given: Any,
) -> None:
    """Time a decoded token and a prompt of a whole random model: plans, implementations, CUDA graphs and none.

    Divided by `full` in plain torch, replayed where graphs are. A plan that evicts has read the context.
    """
    from benchmarks.micro.whole import PLANS, bench

    asked = [plan.strip() for each in plans for plan in each.split(";") if plan.strip()]
    if plans and not asked:
        raise click.UsageError("--plans names no plan.")
    common = {name: given.pop(name) for name in ("device", "threads")}
    measure_cells(
        lambda device: bench(
            contexts=contexts or (),
            prefills=prefill or (),
            plans=asked or PLANS,
            dtype=dtype or ("bfloat16" if device.type == "cuda" else "float32"),
            device=device,
            **given,
        ),
        **common,
    )


if __name__ == "__main__":
    # Before torch is loaded: OpenMP's threads sleep while they wait, as those of `kvtailor` do.
    share_machine()
    micro(prog_name="python -m benchmarks.micro")
