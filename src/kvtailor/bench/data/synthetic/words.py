"""Words and plain English sentences for generated documents: invented names, word pairs, a small template grammar."""

from __future__ import annotations

import random

__all__ = ["CODAS", "ONSETS", "VOWELS", "distinct", "invented", "pair", "sentence"]

ONSETS = (
    "b",
    "br",
    "c",
    "ch",
    "d",
    "dr",
    "f",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "w",
    "z",
)
VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "oo")
CODAS = ("", "l", "m", "n", "r", "s", "t", "nd", "x")

_ADJECTIVES = (
    "amber ancient brave bright broken calm careful clever cold copper crimson curious dark deep distant eager "
    "early empty faded fierce frozen gentle golden grand green hidden hollow honest humble iron ivory jolly large "
    "lonely lost lucky narrow noble old orange pale patient plain proud purple quick quiet rapid rough royal rusty "
    "sacred scarlet secret sharp silent silver simple sleepy small smooth solid stern strange sturdy sudden sunny "
    "swift tall tender thirsty tiny twisted velvet violet warm weary white wild wise wooden yellow young"
)
_NOUNS = (
    "anchor apple arrow badger barrel basket beacon bell bottle bridge button candle canyon carpet castle cedar "
    "chapel cherry circle clock cloud compass coral corner cottage cradle crown desert dolphin dragon eagle ember "
    "engine falcon feather fiddle forest fountain garden gate glacier hammer harbor helmet heron island jacket "
    "kettle kitten ladder lantern lemon letter lion lizard marble market meadow mirror mitten monkey mountain "
    "needle orchard otter paddle palace parrot pebble pencil pepper piano pigeon pillow planet pocket rabbit raven "
    "ribbon river rocket saddle sailor shadow shelter shovel signal spider spoon stable statue stone summit table "
    "temple thunder tiger timber tower tunnel turtle valley violin wagon walnut whistle window winter wizard"
)
_JOBS = (
    "baker barber boatman brewer builder butcher carpenter chemist clerk cook dancer dentist diver doctor driver "
    "farmer fisher gardener glazier goldsmith grocer guard hunter jeweller judge lawyer mason mayor merchant "
    "midwife miller miner musician nurse painter pilot plumber poet porter potter printer professor ranger saddler "
    "sailor scribe sculptor shepherd singer smith soldier spinner surgeon surveyor tailor tanner teacher thatcher "
    "trader translator waiter weaver writer"
)
_FIRST_NAMES = (
    "Ada Agnes Albert Alma Amos Anna Arthur Bella Boris Carl Clara Daniel David Edith Edmund Ella Emma Ernest "
    "Esther Felix Flora Frank George Grace Harold Helen Henry Hugo Ida Irene Isaac Jacob James Jane Joseph Julia "
    "Karl Laura Leo Lewis Lucy Mabel Maria Martin Mary Nora Oliver Oscar Paul Peter Rachel Robert Rosa Ruth Samuel "
    "Sarah Simon Sophia Thomas Victor Walter William"
)

ADJECTIVES, NOUNS, JOBS, FIRST_NAMES = (text.split() for text in (_ADJECTIVES, _NOUNS, _JOBS, _FIRST_NAMES))

_SUBJECTS = (
    "The {adj} {noun}",
    "The old {job}",
    "The {job} from the {noun}",
    "Every {noun} in the village",
    "That {adj} {noun}",
    "The young {job}",
    "Nobody near the {noun}",
    "One {job} of the town",
    "The family of the {job}",
    "My {adj} neighbour",
)
_VERBS = (
    "stood beside the {noun}",
    "was painted by the {adj} {job}",
    "carried the {noun} over the bridge",
    "waited for the rain to stop",
    "remembered the {adj} summer",
    "never spoke about the {noun}",
    "was sold to a {job}",
    "lay under the {adj} {noun}",
    "had been seen near the {noun}",
    "looked at the {adj} {noun} for a while",
    "came back with the {noun}",
    "asked the {job} for help",
    "found nothing but one {noun}",
    "was older than the {noun}",
    "slept through the storm",
)
_ENDINGS = (
    "",
    "",
    " in the morning",
    " before the winter came",
    " without a word",
    " and then went home",
    " as it often happened",
    " because the road was closed",
    " while the others were talking",
    ", and the evening was quiet",
    " for many years",
)


def invented(rng: random.Random, syllables: int = 2) -> str:
    """A made-up lower-case word of ``syllables`` syllables; about 3 million different ones for two."""
    parts = [rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(syllables)]
    return "".join(parts)


def pair(rng: random.Random) -> str:
    """An adjective and a noun, such as "amber falcon"; about 10,000 different ones."""
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def distinct(rng: random.Random, count: int) -> list[str]:
    """``count`` different made-up words."""
    found: dict[str, None] = {}
    while len(found) < count:
        found.setdefault(invented(rng))
    return list(found)


def sentence(rng: random.Random) -> str:
    """One plain English sentence without digits, of 20 to 120 characters."""
    template = rng.choice(_SUBJECTS) + " " + rng.choice(_VERBS) + rng.choice(_ENDINGS) + "."
    while "{" in template:
        for slot, choices in (("{adj}", ADJECTIVES), ("{noun}", NOUNS), ("{job}", JOBS)):
            template = template.replace(slot, rng.choice(choices), 1)
    return template
