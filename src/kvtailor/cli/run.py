"""`kvtailor run`: generate text on a compressed cache, and print what the cache held."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import click

from kvtailor.cli.torchrun import under_torchrun
from kvtailor.cli.words.options import dtype_options

if TYPE_CHECKING:
    from kvtailor.bench.contestant import Contestant
    from kvtailor.bench.subject import Subject

__all__ = ["MeasuredRun", "command", "generate"]

_WEIGHED = ("tokens_seen", "tokens_held", "tokens_read", "bytes_held", "bytes_full")


@dataclass
class Streamer:
    """What `model.generate(streamer=)` calls: turns tokens into text as they come, and keeps the times.

    Attributes:
        decode: ids -> text.
        show: gets each new piece of text.
        ids: the new tokens.
        times: when each of them came, in seconds of `time.perf_counter`.
    """

    decode: Callable[[list[int]], str]
    show: Callable[[str], None]
    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    shown: str = ""
    prompt_is_there: bool = False

    def put(self, ids: Any) -> None:
        """Takes the prompt first, then one token at a time."""
        if not self.prompt_is_there:
            self.prompt_is_there = True
            return
        self.times.append(time.perf_counter())
        self.ids += ids.flatten().tolist()
        text = self.decode(self.ids)
        # A character may need several tokens: until it is whole it decodes to the replacement character.
        if not text.endswith("\ufffd"):
            self._show(text)

    def end(self) -> None:
        """Shows what was held back."""
        self._show(self.decode(self.ids))

    def _show(self, text: str) -> None:
        if len(text) > len(self.shown):
            self.show(text[len(self.shown) :])
            self.shown = text


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """What one generation gave and took. None: not known.

    Attributes:
        model: name of the model.
        plan: canonical form of the plan.
        text: the new text.
        prompt_tokens: tokens of the prompt.
        new_tokens: tokens generated.
        tokens_seen: tokens seen by the cache.
        tokens_held: mean over layers and kv heads of the tokens held at the end.
        tokens_read: the same of those that the last token read; None where it read all.
        bytes_held: unique storages of the cache at the end.
        bytes_full: what the same tokens take uncompressed.
        ttft_seconds: from the call to the first token: prefill and compression.
        tpot_seconds: for each further token, on average.
        dtype: in which the model computes.
        cache_dtype: of the cache whose bytes are `bytes_full`.
        started_cold: this was the process's first generation: times include what the first use of anything costs.
    """

    model: str
    plan: str
    text: str
    prompt_tokens: int
    new_tokens: int
    tokens_seen: int | None
    tokens_held: float | None
    tokens_read: float | None
    bytes_held: int | None
    bytes_full: int | None
    ttft_seconds: float | None
    tpot_seconds: float | None
    started_cold: bool = True
    dtype: str | None = None
    cache_dtype: str | None = None


def generate(
    subject: Subject,
    contestant: Contestant,
    prompt: Any,
    *,
    tokens: int,
    show: Callable[[str], None] = lambda piece: None,
    temperature: float = 0.0,
    seed: int | None = None,
    chunk: int | None = None,
    cold: bool = True,
) -> MeasuredRun:
    """Generates after a prompt (n,) of token ids, through the model's own `generate`.

    Args:
        subject: the model.
        contestant: the plan.
        prompt: (n,) int64.
        tokens: most new tokens.
        show: gets the text piece by piece.
        temperature: 0: the likeliest token; above: sampled.
        seed: random state of the sampling; None: a new one.
        chunk: read so many tokens of the prompt at a time; None: all at once.
        cold: see `MeasuredRun.started_cold`.
    """
    import torch

    from kvtailor.bench.measure.cache_fields import weigh
    from kvtailor.hf.model.processes import same_seed
    from kvtailor.hf.model.vocabulary import check_ids
    from kvtailor.hf.run.arguments import left_out
    from kvtailor.hf.run.first_logits import with_first_checked
    from kvtailor.hf.run.prefill import begin as read_twice
    from kvtailor.hf.versions import hand_cache

    check_ids(subject.model, prompt)
    cache = subject.new_cache(contestant)
    streamer = Streamer(subject.text, show)
    ids = prompt[None].to(subject.device)
    how: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        how["temperature"] = temperature
    # Processes that share the model must draw the same tokens.
    seed = same_seed(seed) if temperature > 0 else seed
    if seed is not None:
        torch.manual_seed(seed)
    begin = time.perf_counter()
    with torch.inference_mode():
        read_twice(subject.model, cache, ids, tokenizer=subject.tokenizer, chunk=chunk)
        if chunk is not None and not cache.seen:
            how["prefill_chunk_size"] = chunk
        subject.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **hand_cache(cache),
            max_new_tokens=tokens,
            pad_token_id=subject.tokenizer.pad_token_id,
            streamer=streamer,
            logits_processor=with_first_checked(subject.model, None, new=True),
            **left_out(subject.model, temperature),
            **how,
        )
    weight, times = weigh(cache), streamer.times
    return MeasuredRun(
        model=subject.name,
        plan=contestant.text or contestant.label,
        text=streamer.shown,
        prompt_tokens=int(prompt.numel()),
        new_tokens=len(streamer.ids),
        ttft_seconds=times[0] - begin if times else None,
        tpot_seconds=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
        started_cold=cold,
        dtype=str(subject.dtype).removeprefix("torch."),
        cache_dtype=str(subject.cache_dtype).removeprefix("torch."),
        **{name: weight.get(name) for name in _WEIGHED},
    )


def _number(option: click.Parameter, value: float) -> float:
    if math.isnan(value) or 0 < value < 1e-4:
        raise click.BadParameter(f"{value} is no temperature: give 0, or a number from 0.0001 to 1000", param=option)
    return value


@click.command(short_help="Generate text on a compressed cache.")
@click.option(
    "--model",
    default="demo",
    show_default=True,
    help="'demo' or 'demo-draft' (embedded), a folder, a GGUF file, or a hub name.",
)
@click.option(
    "--plan", default="full", show_default=True, help='One line, such as "snapkv @ tokens=256", a TOML file, or a card.'
)
@click.option("--prompt", help="The prompt itself.")
@click.option(
    "--prompt-file", type=click.File(encoding="utf-8-sig"), help="A file with the prompt; without it standard input."
)
@click.option("--chat", is_flag=True, help="The prompt is a message of the user in the model's chat template.")
@click.option("--system", metavar="TEXT", help="With --chat, the system's message.")
@click.option(
    "--template",
    multiple=True,
    metavar="NAME=VALUE",
    callback=lambda _, option, value: _variables(option, value),
    help="With --chat, a variable of the chat template, such as enable_thinking=false; may be given again.",
)
@click.option(
    "--max-new-tokens", type=click.IntRange(1), default=64, show_default=True, help="Most tokens to generate."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 1000),
    default=0.0,
    show_default=True,
    help="0: the likeliest token.",
    callback=lambda _, option, value: _number(option, value),
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Random state of the sampling.")
@click.option("--chunk", type=click.IntRange(1), help="Read so many tokens of the prompt at a time; bounds the peak.")
@click.option(
    "--beyond",
    is_flag=True,
    help="Allow more tokens than the model has positions; with streamingllm and --chunk no distance exceeds them.",
)
@dtype_options
@click.option("--device", help="Such as cpu or cuda.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line of standard output.")
def command(
    model: str,
    plan: str,
    prompt: str | None,
    prompt_file: Any,
    chat: bool,
    system: str | None,
    template: dict[str, Any],
    max_new_tokens: int,
    temperature: float,
    seed: int | None,
    chunk: int | None,
    beyond: bool,
    dtype: str | None,
    cache_dtype: str | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Generate text on a compressed cache, and say what the cache held.

    \b
    kvtailor run --plan "snapkv @ tokens=256" --prompt-file long.txt
    echo "Once upon a time" | kvtailor run --plan "streaming @ tokens=64"
    kvtailor run --model NAME --chat --system "Be brief." --prompt "Who are you?"
    kvtailor run --plan "streamingllm @ tokens=1024" --chunk 512 --beyond \\
        --prompt-file book.txt

    The text goes to standard output, the numbers to standard error.
    """
    if not chat and (system is not None or template):
        option = "--template" if system is None else "--system"
        raise click.UsageError(f"{option} is written by the model's chat template: give --chat too.")
    text = _prompt_text(prompt, prompt_file)

    from rich.console import Console

    from kvtailor.bench.contestant import Contestant
    from kvtailor.bench.subject import Subject
    from kvtailor.errors import KvtailorError
    from kvtailor.hf.model.processes import started
    from kvtailor.hf.run.arguments import check_config, told

    console = Console(stderr=True, highlight=False)
    try:
        contestant = Contestant.named(plan)
        with console.status(f"loading {model}"):
            started(device, begin=True)
            subject = Subject.load(model, dtype=dtype, cache_dtype=cache_dtype, device=device)
        ids = subject.message(text, system=system, template=template) if chat else subject.prompt(text)
        if beyond:
            _check_beyond(subject)
        left = None if beyond else _positions_left(subject, int(ids.numel()))
        tokens = max_new_tokens if left is None else min(max_new_tokens, left)
        if tokens < max_new_tokens:
            console.print(
                f"The model has positions for {tokens} new tokens after this prompt, not for {max_new_tokens}."
            )
        check_config(subject.model)
        said = told(subject.model, temperature)
        if said is not None:
            console.print(said, markup=False)
        found = generate(
            subject,
            contestant,
            ids,
            tokens=tokens,
            show=lambda piece: click.echo(piece, nl=False),
            temperature=temperature,
            seed=seed,
            chunk=chunk,
        )
    except (KvtailorError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo()
    _say(found, console)
    if as_json:
        click.echo(json.dumps(asdict(found), ensure_ascii=False))


def _variables(option: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    """Values are JSON where they are that, also as Python writes it, and text otherwise."""
    found = {}
    for each in given:
        name, sign, value = each.partition("=")
        if not sign or not name.isidentifier():
            raise click.BadParameter(f"{each!r} is no NAME=VALUE, such as enable_thinking=false", param=option)
        as_python = {"true": True, "false": False, "none": None, "null": None}
        try:
            found[name] = as_python[value.lower()] if value.lower() in as_python else json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _prompt_text(prompt: str | None, prompt_file: Any) -> str:
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("Both --prompt and --prompt-file were given: give one of them.")
    if prompt is None and prompt_file is None and under_torchrun():
        raise click.UsageError(
            "Several processes cannot share standard input: give --prompt TEXT or --prompt-file FILE under torchrun."
        )
    if prompt is None and prompt_file is None and sys.stdin.isatty():
        raise click.UsageError("There is no prompt: give --prompt TEXT, --prompt-file FILE, or text on standard input.")
    try:
        text = prompt if prompt is not None else (prompt_file or click.open_file("-", encoding="utf-8-sig")).read()
    except UnicodeDecodeError as error:
        raise click.ClickException(f"The prompt is not UTF-8 text ({error}): give a text file.") from error
    if not text.strip():
        raise click.UsageError(
            "The prompt is empty: give --prompt TEXT, --prompt-file FILE, or text on standard input."
        )
    return str(text)


def _positions_left(subject: Subject, prompt: int) -> int | None:
    """Tokens that fit behind the prompt; None where the model's limit is not known."""
    from kvtailor.errors import KvtailorError

    if subject.positions is None:
        return None
    if prompt >= subject.positions:
        raise KvtailorError(
            f"the prompt has {prompt} tokens, but {subject.name} was made for {subject.positions}: give a "
            "prompt of at most "
            f"{subject.positions - 1} tokens, a model with more positions, or --beyond"
        )
    return subject.positions - prompt


def _check_beyond(subject: Subject) -> None:
    """Raises where the model looks positions up in a table, which has no more of them."""
    from torch import nn

    from kvtailor.errors import KvtailorError

    words = subject.model.get_input_embeddings()
    for name, module in subject.model.named_modules():
        # OPT's table has two rows more than it has positions.
        table = isinstance(module, nn.Embedding) and module is not words
        if table and subject.positions is not None and 0 <= module.num_embeddings - subject.positions <= 2:
            raise KvtailorError(
                f"--beyond: {subject.name} looks its {subject.positions} positions up in a table ({name}), so nothing "
                "can stand beyond them; leave it out, or take a model with rotary positions"
            )


def _say(found: MeasuredRun, console: Any) -> None:
    from kvtailor.ops.sizes import byte_text

    lines = []
    if found.bytes_held is not None and found.bytes_full:
        share = 100 * found.bytes_held / found.bytes_full
        of = "" if found.cache_dtype is None else f" in {found.cache_dtype}"
        held, full = byte_text(found.bytes_held), byte_text(found.bytes_full)
        lines.append(f"cache   {held} held, {full} full{of}: {share:.1f} %")
    if found.tokens_held is not None:
        # What is made last is fed to nothing.
        last = ", the last not fed" if found.tokens_seen == found.prompt_tokens + found.new_tokens - 1 else ""
        read = "" if found.tokens_read is None else f"{found.tokens_read:.0f} read for the last token, "
        lines.append(
            f"tokens  {found.tokens_held:.0f} held, {read}{found.tokens_seen} seen ({found.prompt_tokens} prompt, "
            f"{found.new_tokens} new{last})"
        )
    if found.ttft_seconds is not None:
        further = f", {1000 * found.tpot_seconds:.1f} ms for each next" if found.tpot_seconds is not None else ""
        cold = " (cold: to compare, `kvtailor bench`)" if found.started_cold else ""
        lines.append(f"time    {1000 * found.ttft_seconds:.0f} ms to the first token{further}{cold}")
    console.print()
    console.print(f"plan    {found.plan}", style="bold", markup=False)
    for line in lines:
        console.print(line, style="dim", markup=False)
