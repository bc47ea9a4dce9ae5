"""What a task's class body is written with: settings, options of the command line, metrics, and what tasks share.

`bench.kinds` reads a task's declarations from its file without importing it, so that a suite can be checked and
`kvtailor bench --help` shown before torch is loaded. So a declaration is made of literals and of the names in here
alone, and this module imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from typing import Any

from kvtailor.bench.data.synthetic.plots import ALL_TASKS

__all__ = [
    "BATCHES",
    "CONTEXT",
    "CONTEXTS",
    "CONTINUATION",
    "DOCUMENT_KINDS",
    "EXAMPLES",
    "NEW_TOKENS",
    "ROUNDS",
    "STATE",
    "STATES_APART",
    "WINDOWS",
    "Metric",
    "Option",
    "Setting",
    "setting",
    "setting_of",
]


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of `kvtailor bench`.

    Attributes:
        flag: as it is typed, such as "--new-tokens".
        help: what `kvtailor bench --help` shows.
        type: of one value: int, float, str; bool for a flag without a value.
        unit: "bytes" where a text such as 8GiB is read as a number of bytes; else empty.
        listed: several values in one text, with ',' between.
        default: what is taken where it is not given, as it would be typed; None: the task's own default.
        least, most: bounds of an int.
        like: the option whose value is taken where this one is not given.
    """

    flag: str
    help: str
    type: type = int
    unit: str = ""
    listed: bool = False
    default: Any = None
    least: int | None = None
    most: int | None = None
    like: Option | None = None

    @property
    def name(self) -> str:
        """The name of its value."""
        return self.flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is declared beside a field of a task.

    Attributes:
        option: of the command line; its flag alone for one that this task declares with `help`; None: there is none.
        help: for `option` where that is a flag.
        each: the option has several values, and the task is measured once for each of them.
        counts_tokens: it is a number of tokens. The sum of all such settings must fit into the model's positions, of a
            list the largest.
        choices: the texts that it may be; empty: anything of its type.
        what: what it chooses, for the sentence that refuses another choice.
        times: the option's value is multiplied by it.
    """

    option: Option | str | None = None
    help: str = ""
    each: bool = False
    counts_tokens: bool = False
    choices: tuple[str, ...] = ()
    what: str = ""
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number of a task's records.

    Attributes:
        name: in `Record.metrics`; by layer also `NAME_0`, `NAME_1`, ...
        unit: as `results.csv` writes it, such as "nats per token"; empty where it has none.
        higher_is_better: None where neither end is better.
        mean_of: the list of `Record.values` whose mean it is; a record in which it is not is refused.
        meaning: half a sentence; empty where the name says it.
    """

    name: str
    unit: str = ""
    higher_is_better: bool | None = None
    mean_of: str | None = None
    meaning: str = ""


def setting(
    default: Any = MISSING,
    *,
    option: Option | str | None = None,
    help: str = "",
    each: bool = False,
    counts_tokens: bool = False,
    choices: Sequence[str] = (),
    what: str = "",
    times: int = 1,
) -> Any:
    """Return a field of a task that a suite may set; the arguments are those of `Setting`.

    Args:
        default: what is taken where nothing is given; without it a suite must give it.
        option, help, each, counts_tokens, choices, what, times: see `Setting`.
    """
    made = Setting(
        option=option,
        help=help,
        each=each,
        counts_tokens=counts_tokens,
        choices=tuple(choices),
        what=what,
        times=times,
    )
    return dataclasses.field(default=default, metadata={"setting": made})


def setting_of(field: Any) -> Setting | None:
    """Return what `setting` declared of a dataclass field; None for a field that no suite sets."""
    found = field.metadata.get("setting")
    return found if isinstance(found, Setting) else None


DOCUMENT_KINDS = tuple(ALL_TASKS)
STATES_APART = 10_000
"""Random states between two numbers of --state: more than a run has documents of one kind, or rounds."""

CONTEXT = Option(flag="--context", least=1, help="Tokens prefilled and compressed.  [512, or what the model has]")
CONTINUATION = Option(flag="--continuation", least=1, help="Tokens scored after them.  [a quarter of --context]")
WINDOWS = Option(flag="--windows", least=1, help="Windows of each text.  [50, 20 for fidelity]")
EXAMPLES = Option(
    flag="--examples", least=1, help="So many examples of each of longbench, zeroscrolls, harness.  [all]"
)
STATE = Option(
    flag="--state",
    default=0,
    least=0,
    most=49,
    help="Another number takes other documents: those generated, windows of a text, --examples of a set.",
)
CONTEXTS = Option(
    flag="--contexts",
    listed=True,
    like=CONTEXT,
    help="Prompts of speed, memory and speculation in tokens, with ',' between.  [--context]",
)
BATCHES = Option(flag="--batches", listed=True, default="1", help="Rows of speed and memory, with ',' between.")
NEW_TOKENS = Option(
    flag="--new-tokens", listed=True, default="32", help="Tokens decoded in a timed round, with ',' between."
)
ROUNDS = Option(flag="--rounds", default=10, least=1, help="Timed rounds over all plans.")
