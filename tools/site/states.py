"""The states of a job in the documents: the picture `states.svg` and the page `states.md`, from the operator's table.

The places of boxes and labels are written here; which states, arrows and events there are comes from the table. A state
without a place, and an arrow that the table does not have, fail. Transitions without an arrow are listed below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ppojob_operator.reconcile.states import FINAL, TRANSITIONS, WITH_TRAINER, WITHOUT_TRAINER, Event, State
from tools.site.drawing import AMBER, BLUE, GREEN, GREY, PALE, RED, VIOLET, Drawing, Point

_HEIGHT, _LINE = 44.0, 15.0
_PLACES: Mapping[State, tuple[float, float, float, str]] = {
    State.PENDING: (20, 130, 110, PALE),
    State.FETCHING: (170, 30, 110, PALE),
    State.QUEUED: (330, 30, 110, PALE),
    State.WAITING_FOR_PODS: (310, 130, 150, AMBER),
    State.SUBMITTING: (555, 130, 145, AMBER),
    State.TRAINER_SUBMITTED: (785, 130, 160, GREEN),
    State.RESTARTING: (310, 270, 150, AMBER),
    State.RUNNING: (785, 270, 160, GREEN),
    State.SUSPENDED: (20, 420, 110, VIOLET),
    State.SUSPENDING: (285, 420, 120, VIOLET),
    State.REALLOCATING: (440, 420, 130, VIOLET),
    State.PREEMPTED: (620, 420, 120, VIOLET),
    State.SUCCEEDED: (640, 540, 120, BLUE),
    State.FAILED: (830, 540, 120, RED),
}


@dataclass(frozen=True)
class _Arrow:
    """A transition that the picture draws."""

    before: State
    after: State
    path: tuple[Point, ...]
    label: Point
    anchor: str = "middle"


_ARROWS = (
    _Arrow(State.PENDING, State.FETCHING, ((75, 130), (75, 52), (168, 52)), (82, 44), "start"),
    _Arrow(State.PENDING, State.WAITING_FOR_PODS, ((130, 152), (308, 152)), (218, 145)),
    _Arrow(
        State.FETCHING, State.WAITING_FOR_PODS, ((225, 74), (225, 120), (330, 120), (330, 128)), (232, 112), "start"
    ),
    _Arrow(State.FETCHING, State.QUEUED, ((280, 52), (328, 52)), (304, 22)),
    _Arrow(State.QUEUED, State.WAITING_FOR_PODS, ((400, 74), (400, 128)), (408, 104), "start"),
    _Arrow(State.WAITING_FOR_PODS, State.SUBMITTING, ((460, 152), (553, 152)), (507, 145)),
    _Arrow(State.SUBMITTING, State.TRAINER_SUBMITTED, ((700, 152), (783, 152)), (741, 145)),
    _Arrow(State.TRAINER_SUBMITTED, State.RUNNING, ((865, 174), (865, 268)), (873, 226), "start"),
    _Arrow(State.RUNNING, State.RESTARTING, ((783, 292), (462, 292)), (625, 285)),
    _Arrow(State.RESTARTING, State.WAITING_FOR_PODS, ((385, 268), (385, 176)), (393, 226), "start"),
    _Arrow(State.RUNNING, State.SUSPENDING, ((810, 314), (810, 390), (345, 390), (345, 418)), (640, 383), "start"),
    _Arrow(State.RUNNING, State.REALLOCATING, ((825, 314), (825, 400), (520, 400), (520, 418)), (528, 414), "start"),
    _Arrow(State.RUNNING, State.PREEMPTED, ((840, 314), (840, 442), (742, 442)), (790, 435)),
    _Arrow(State.SUSPENDING, State.SUSPENDED, ((283, 442), (132, 442)), (207, 435)),
    _Arrow(State.REALLOCATING, State.RESTARTING, ((460, 418), (460, 340), (420, 340), (420, 316)), (467, 355), "start"),
    _Arrow(State.SUSPENDED, State.WAITING_FOR_PODS, ((75, 418), (75, 200), (340, 200), (340, 176)), (83, 216), "start"),
    _Arrow(State.RUNNING, State.SUCCEEDED, ((855, 314), (855, 500), (700, 500), (700, 538)), (776, 493)),
    _Arrow(
        State.FAILED,
        State.RESTARTING,
        ((828, 562), (780, 562), (780, 594), (277, 594), (277, 300), (308, 300)),
        (420, 588),
    ),
    _Arrow(State.RUNNING, State.FAILED, ((930, 314), (930, 538)), (922, 500), "end"),
)


def transitions() -> dict[tuple[State, State], list[Event]]:
    """Return the events that lead from one state to another one."""
    found: dict[tuple[State, State], list[Event]] = {}
    for before, row in TRANSITIONS.items():
        for event, after in row.items():
            if after != before:
                found.setdefault((before, after), []).append(event)
    return found


def picture() -> Drawing:
    """Return the states with the transitions of most jobs as arrows, and all others as lines of text."""
    lines = _others()
    d = Drawing(
        960, 620 + round(len(lines) * 17), "The states of a PPOJob and the events that lead from one to the next"
    )
    for state in State:
        x, y, width, fill = _PLACES[state]
        phases = dict.fromkeys((state.phase(0), state.phase(1)))
        d.box((x, y), (width, _HEIGHT), state, [] if list(phases) == [state] else [", ".join(phases)], fill)
    found = transitions()
    for arrow in _ARROWS:
        events = found[arrow.before, arrow.after]
        d.arrow(*arrow.path)
        x, y = arrow.label
        upwards = arrow.anchor == "middle"
        for number, event in enumerate(reversed(events) if upwards else events):
            d.text((x, y + number * (-_LINE if upwards else _LINE)), event, size=11, ink=GREY, anchor=arrow.anchor)
    d.text((20, 612), "Without an arrow:", is_bold=True)
    d.text((940, 612), "Second lines: the phase, where it has another name.", size=12, ink=GREY, anchor="end")
    for number, line in enumerate(lines, 1):
        d.text((20, 612 + number * 17), line, size=12, ink=GREY)
    return d


def page() -> str:
    """Return the page of the states: what each is, and where each event leads."""
    phases = [
        f"| `{state}` | {' or '.join(f'`{phase}`' for phase in dict.fromkeys((state.phase(0), state.phase(1))))} | "
        f"{state.meaning} |"
        for state in State
    ]
    events = [f"| `{event}` | {event.meaning} | {'; '.join(_targets(event))} |" for event in Event]
    return "\n".join(
        [
            "<!-- Generated by `make generate` from operator/ppojob_operator/reconcile/states.py. -->",
            "# States of a job",
            "",
            "The operator keeps a table of a job's states and of the events that lead from one to the next. At each",
            "reconcile, it derives the state from the status and takes the first event in the list below that applies.",
            "An event is an observation, so it applies as long as its cause exists. An event occurs only in the states",
            "that its row names. `status.phase` is a function of the state.",
            "",
            "![The states of a PPOJob and its transitions, as in the tables below](pictures/states.svg)",
            "",
            "## States",
            "",
            "| state | phase | meaning |",
            "|---|---|---|",
            *phases,
            "",
            "In `WaitingForPods` and `Submitting`, the phase is `Starting` in the first attempt, then `Restarting`.",
            "",
            "The next table uses these groups of states:",
            "",
            "| group | states |",
            "|---|---|",
            f"| states without a trainer | {_listed(WITHOUT_TRAINER)} |",
            f"| states with a trainer | {_listed(WITH_TRAINER)} |",
            f"| final states | {_listed(FINAL)} |",
            "",
            "## Events",
            "",
            "The first event that applies decides.",
            "",
            "| event | meaning | leads to |",
            "|---|---|---|",
            *events,
            "",
        ]
    )


def _others() -> list[str]:
    """Return a line for each state that transitions without an arrow lead to."""
    drawn = {(arrow.before, arrow.after) for arrow in _ARROWS}
    lines = []
    for after in State:
        rest = {before: events for (before, to), events in transitions().items() if to == after}
        sources = [before for before in rest if (before, after) not in drawn]
        if sources:
            words = ", ".join(dict.fromkeys(event for before in sources for event in rest[before]))
            lines += _wrapped(f"to {after} from {_named(sources)}: {words}".replace("`", ""))
    return lines


def _targets(event: Event) -> list[str]:
    """Return where an event leads, from which states."""
    by_target: dict[State, list[State]] = {}
    for before, row in TRANSITIONS.items():
        if event in row:
            by_target.setdefault(row[event], []).append(before)
    stays = [to for to, sources in by_target.items() if sources == [to]]
    lines = [f"`{to}` from {_named(sources)}" for to, sources in by_target.items() if to not in stays]
    return [*lines, f"no other state, from {_named(stays)}"] if stays else lines


_NOT_FINAL = (*WITHOUT_TRAINER, *WITH_TRAINER)
_GROUPS = (
    (tuple(State), "every state"),
    (_NOT_FINAL, "every state but the final ones"),
    (_NOT_FINAL[1:], "every state but `Pending` and the final ones"),
    (WITHOUT_TRAINER, "every state without a trainer"),
    (WITH_TRAINER, "every state with a trainer"),
    (FINAL, "the final states"),
)


def _named(states: Sequence[State]) -> str:
    name = next((name for group, name in _GROUPS if set(group) == set(states)), "")
    return name or _listed(states)


def _listed(states: Sequence[State]) -> str:
    return ", ".join(f"`{state}`" for state in states)


def _wrapped(text: str, width: int = 135) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > width:
            lines.append("   ")
        lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines
