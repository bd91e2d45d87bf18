"""The actors of one `DeviceGroup`, and calls on all of them.

A call is one message to each rank; `Pending` waits for the answers. When a rank fails, the others may sit in a collective that it
will never join: those that do not answer soon are killed, and the group with them. What a method's arguments and results are cut
and joined by is left to `dispatch` and `collect` of the core.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import ray
from ray.exceptions import RayActorError, RayError

from twinkle_core import session
from twinkle_core.errors import ModeError, first_line
from twinkle_core.mesh import DeviceGroup
from twinkle_ray.messages import Failure, Notes, Request, Site

GRACE_S = 5.0
"""How long the other ranks may take to answer after one has failed. They fail for the same reason at once, or never answer."""

MOST_PENDING = 16
"""Calls that may run unseen on a group, so that what they hold does not grow without bound."""

_SMALL = (str, bytes, int, float, bool, type(None))


class ActorGroup:
    """The ranks of a group, in order.

    Attributes:
        group: what the script declared.
        actors: one a rank.
        places: what `Rank.where` returned for each.
        failure: why the group was stopped, or None.
        told: failures of any group that the script was told of; all groups of a run share it.
    """

    def __init__(
        self, group: DeviceGroup, actors: Sequence[Any], places: Sequence[Mapping[str, Any]], *, told: set[Failure] | None = None,
    ) -> None:
        self.group = group
        self.actors = list(actors)
        self.places = list(places)
        self.failure: Failure | None = None
        self.told = set[Failure]() if told is None else told
        self._unseen: list[Pending] = []
        self._uncleared: set[int] = set()  # ranks that do not know yet that their failure was seen

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorGroup, (self.group, self.actors, self.places)

    @property
    def name(self) -> str:
        """The group's name."""
        return self.group.name

    def create(self, number: int, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], *, site: Site) -> None:
        """Build a component on every rank."""
        self.check_usable(site)
        call = ray.put((args, kwargs)) if len(self.actors) > 1 else (args, kwargs)
        answers = {rank: actor.create.remote(number, cls, call) for rank, actor in enumerate(self.actors)}
        Pending(self, answers, site=site, what=f"`{cls.__name__}(...)`").wait()

    def submit(self, request: Request, calls: Mapping[int, Any], *, wanted: Sequence[int], site: Site, what: str) -> "Pending":
        """Send a call to the ranks in `calls`; `wanted` are those whose result is used. Ranks may share one call object."""
        self.check_usable(site)
        shared = _shared(list(calls.values()))
        answers: dict[int, Any] = {}
        for rank, call in calls.items():
            own = Request(component=request.component, method=request.method, wants_value=rank in wanted,
                          data_states=request.data_states if rank == 0 else None, is_lazy=request.is_lazy,
                          clears=rank in self._uncleared)
            answers[rank] = self.actors[rank].call.remote(own, shared.get(id(call), call))
        self._uncleared -= calls.keys()
        pending = Pending(self, answers, site=site, what=what)
        if request.is_lazy:
            self._unseen.append(pending)
        return pending

    def check_usable(self, site: Site) -> None:
        """Raise what has failed here unseen, or `ModeError` if the group was stopped."""
        if self.failure is not None:
            raise ModeError(f"Group `{self.name}` was stopped after a failure: {self.failure.text}\nIn {self.failure.where}. Start "
                            "the run again, by hand or with `--max-restarts`.")
        while self._unseen and (len(self._unseen) >= MOST_PENDING or self._unseen[0].is_done()):
            self._unseen.pop(0).check()

    def settle_before(self, pending: "Pending") -> None:
        """Wait for the calls that were made before `pending` and that nobody has waited for: errors come in order."""
        while self._unseen and self._unseen[0] is not pending:
            self._unseen.pop(0).check()
        if self._unseen:
            self._unseen.pop(0)

    def finish(self) -> None:
        """Wait for every call. Raises: what failed unseen."""
        while self._unseen:
            self._unseen.pop(0).check()

    def seen(self, failure: Failure, *, stuck: bool) -> None:
        """Note that the script is about to be told of a failure; stop the ranks if some of them never answered."""
        self._unseen, self._uncleared = [], set(range(len(self.actors)))
        if stuck or failure.is_death:
            self.failure = failure
            self.kill()

    def stop(self, *, timeout_s: float) -> None:
        """End the sessions of the ranks that are idle, then all of them."""
        if self.failure is None and all(pending.is_done() for pending in self._unseen):
            ray.wait([actor.stop.remote() for actor in self.actors], num_returns=len(self.actors), timeout=timeout_s)
        self.kill()

    def kill(self) -> None:
        """End the processes."""
        for actor in self.actors:
            ray.kill(actor, no_restart=True)

    def death_of(self, rank: int, error: BaseException, *, what: str) -> Failure:
        """Return what the script is told when a rank's answer is an error of Ray's."""
        place = self.places[rank]
        is_death = isinstance(error, RayActorError)
        text = f"{'The process died' if is_death else type(error).__name__}: {_reason(error)}"
        where = f"{what} on rank {rank} of group `{self.name}` (host {place['host']}, process {place['pid']})"
        return Failure(error=None, text=text, trace="", where=where, time=time.time(), is_death=is_death)


class Pending:
    """A call that runs on the ranks of a group. The answer of a rank is two objects: the value, and `Notes`."""

    def __init__(self, group: ActorGroup, answers: Mapping[int, Any], *, site: Site, what: str) -> None:
        self.values = {rank: value for rank, (value, _) in answers.items()}
        self._group = group
        self._notes = {rank: notes for rank, (_, notes) in answers.items()}
        self._site = site
        self._what = what
        self._outcome: dict[int, Notes] | Failure | None = None

    def is_done(self) -> bool:
        """Whether every rank has answered."""
        return self._outcome is not None or not ray.wait(
            list(self._notes.values()), num_returns=len(self._notes), timeout=0, fetch_local=False)[1]

    def wait(self) -> dict[int, Notes]:
        """Wait for every rank and return the notes. Raises: what failed first on a rank."""
        if self._outcome is None:
            self._group.settle_before(self)
        outcome = self._settled()
        if isinstance(outcome, Failure):
            self._tell(outcome)
        return outcome

    def check(self) -> None:
        """Wait for every rank. Raises: what failed first, unless the script was told of it already, through another call."""
        outcome = self._settled()
        if isinstance(outcome, Failure) and outcome not in self._group.told:
            self._tell(outcome)

    def fetch(self, ranks: Sequence[int]) -> list[Any]:
        """Return the values of some ranks."""
        self.wait()
        try:
            return ray.get([self.values[rank] for rank in ranks])
        except RayError as error:
            self._tell(self._group.death_of(ranks[0], error, what=self._what))

    def _tell(self, failure: Failure) -> NoReturn:
        self._group.told.add(failure)
        failure.throw(self._site)

    def _settled(self) -> dict[int, Notes] | Failure:
        if self._outcome is None:
            self._outcome = self._settle()
        return self._outcome

    def _settle(self) -> dict[int, Notes] | Failure:
        notes: dict[int, Notes] = {}
        failures: dict[int, Failure] = {}
        waiting = {ref: rank for rank, ref in self._notes.items()}
        deadline = None
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=left)
            if not ready:
                break
            rank = waiting.pop(ready[0])
            try:
                notes[rank] = ray.get(ready[0])
                failure = notes[rank].failure
            except RayError as error:
                failure = self._group.death_of(rank, error, what=self._what)
            if failure is not None:
                failures[rank] = failure
                deadline = deadline or time.monotonic() + GRACE_S
        if not failures:
            _report(notes)
            return notes
        first = min(failures.values(), key=lambda failure: (not failure.is_death, failure.time))  # the others miss one that died
        first = next(failures[rank] for rank in sorted(failures) if failures[rank].text == first.text)
        self._group.seen(first, stuck=bool(waiting))
        return first


def _report(notes: Mapping[int, Notes]) -> None:
    """Hand what the ranks reported to the script's session."""
    current = session.active()
    if current is None:
        return
    for rank in sorted(notes):
        for step, numbers in notes[rank].metrics:
            current.report_metrics(step, numbers)
    if 0 in notes and notes[0].progress is not None:
        current.latest_metrics = notes[0].progress


def _shared(calls: list[Any]) -> dict[int, Any]:
    """Return id -> reference of the calls that several ranks get and that may be large: they are stored once."""
    counts: dict[int, int] = {}
    for call in calls:
        counts[id(call)] = counts.get(id(call), 0) + 1
    return {id(call): ray.put(call) for call in {id(call): call for call in calls}.values()
            if counts[id(call)] > 1 and not _is_small(call)}


def _is_small(call: Any) -> bool:
    args, kwargs = call
    return all(isinstance(value, _SMALL) for value in (*args, *kwargs.values()))


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if isinstance(error, RayActorError) and lines else first_line(error)
