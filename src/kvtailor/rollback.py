"""Forwards that can be taken back: while a cache speculates, what it reads joins and waits until it settles.

Between, `Route.take_back` forgets the newest tokens as if they had never come: they are in the tail alone. What is left
is observed, evicted and encoded at the end as if it had been decoded token by token, however many came at once.
"""

from __future__ import annotations

from kvtailor.route import Route

__all__ = ["room", "settle", "speculate", "stop_speculating"]


def speculate(route: Route) -> None:
    """From now on forwards can be taken back."""
    route.speculating = True
    for state in route.states:
        state.recording = True


def settle(route: Route) -> None:
    """Does what was put off for all tokens that were not taken back."""
    for state in route.states:
        route.commit(state, rejected=0)


def stop_speculating(route: Route) -> None:
    """Settles, and takes what comes as it comes again."""
    settle(route)
    route.speculating = False
    for state in route.states:
        state.recording = False


def room(route: Route) -> int | None:
    """See `LayerState.room`, of all layers."""
    rooms = [room for state in route.states if (room := state.room(route.plan)) is not None]
    return min(rooms) if rooms else None
