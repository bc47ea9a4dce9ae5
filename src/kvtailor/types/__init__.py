"""The types that every stage shares: lanes, segments, the evidence that a method may see, and what a query may see.

Shape letters, used everywhere and nowhere else:
`b` batch rows, `l` layers, `q` query heads, `h` kv heads, `g = q / h`, `t` new tokens, `n` held tokens,
`k` kept tokens, `d` head size, `m` lanes, `s` slots of a lane. What a lane is stands in `types.lanes`.
"""

from kvtailor.types.coordinates import Coordinates, PickedChannels
from kvtailor.types.evidence import Moments, Needs, Repetition, Rotation
from kvtailor.types.head_share import ALL_HEADS, HeadShare
from kvtailor.types.held import Held
from kvtailor.types.key_offset import KeyOffset
from kvtailor.types.lanes import Layout
from kvtailor.types.segment_view import Lift, SegmentView
from kvtailor.types.segments import PlainSegment, Segment
from kvtailor.types.softmax import PLAIN_SOFTMAX, Softmax
from kvtailor.types.visibility import Visibility

__all__ = [
    "ALL_HEADS",
    "Coordinates",
    "HeadShare",
    "Held",
    "KeyOffset",
    "Layout",
    "Lift",
    "Moments",
    "Needs",
    "PLAIN_SOFTMAX",
    "PickedChannels",
    "PlainSegment",
    "SegmentView",
    "Repetition",
    "Rotation",
    "Segment",
    "Softmax",
    "Visibility",
]
