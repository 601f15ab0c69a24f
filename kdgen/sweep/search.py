"""Search strategies: which points are tried next. All are asked and told; equal seeds and answers give equal questions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kdgen.errors import ToolchainError, UsageError
from kdgen.sweep.space import Space

StrategyName = Literal["grid", "random", "halving", "optuna"]
STRATEGIES: tuple[StrategyName, ...] = ("grid", "random", "halving", "optuna")
#: Most points that a grid visits.
GRID_LIMIT = 200_000
#: Points tried in a row without one that is allowed, before a strategy gives up.
PATIENCE = 20_000
#: Configurations of a strategy that would never end by itself.
DEFAULT_BUDGET = 100

_RUNGS = (0.25, 0.5, 1.0)  # share of the shapes that each rung of halving sees
_KEEP = 3  # one of so many goes on to the next rung
_LEARNER_PATIENCE = 500  # of a sampler, whose every question costs more the more it has asked
_SHORT = 4  # lists of so many values have no order worth following
_MOST_STEPS = 8  # from neighbour to neighbour


@dataclass(frozen=True)
class Trial:
    """A question: try this point.

    Attributes:
        point: of the space.
        share: of the shapes, the weightiest first, that are looked at; 1.0 for all.
    """

    point: int
    share: float = 1.0


class Strategy(Protocol):
    """What decides which points are tried."""

    def ask(self, count: int) -> list[Trial]:
        """Up to `count` trials, whose scores are told before the next are asked for; none when the search is over."""

    def tell(self, trial: Trial, score: float | None) -> None:
        """A trial's score, smaller is better; None when the configuration cannot be chosen."""


def make_strategy(name: StrategyName | str, space: Space, seed: int, budget: int | None) -> Strategy:
    """The strategy called `name`.

    Args:
        name: one of `STRATEGIES`.
        space: that is searched.
        seed: of all that is random.
        budget: configurations that halving starts with.

    Raises:
        UsageError: an unknown name, or a grid over more points than anybody waits for.
        ToolchainError: optuna is not installed.
    """
    if name == "grid":
        if space.size > GRID_LIMIT:
            raise UsageError(
                f"the space has {space.size:,} points, a grid visits at most {GRID_LIMIT:,}: "
                "use --strategy random, halving or optuna with a --budget, or a smaller space"
            )
        return Listed(iter(range(space.size)))
    if name == "random":
        return Listed(shuffled(space.size, seed))
    if name == "halving":
        return Halving(space, seed, budget or DEFAULT_BUDGET)
    if name == "optuna":
        return Optuna(space, seed)
    raise UsageError(f"unknown strategy '{name}'; allowed: {', '.join(STRATEGIES)}")


def shuffled(size: int, seed: int) -> Iterator[int]:
    """Numbers below `size` in random order, each once; those of a large range one by one, without ever listing it."""
    rng = random.Random(seed)
    if size <= 1 << 20:
        order = list(range(size))
        rng.shuffle(order)
        yield from order
        return
    seen: set[int] = set()
    while len(seen) < size:
        point = rng.randrange(size)
        if point not in seen:
            seen.add(point)
            yield point


class Listed:
    """Points one after another, whatever their scores: grid and random search."""

    def __init__(self, points: Iterator[int]):
        self._points = points

    def ask(self, count: int) -> list[Trial]:
        """The next points."""
        return [Trial(point) for _, point in zip(range(count), self._points, strict=False)]

    def tell(self, trial: Trial, score: float | None) -> None:
        """Scores decide nothing."""


class Halving:
    """Successive halving: many random points on few shapes, the best third on more, the best third of those on all.

    Then the neighbours of the best, which differ in one parameter, and theirs, until none is better: a search that only samples ends
    beside the best place, at another spot with every seed.
    """

    def __init__(self, space: Space, seed: int, first: int):
        self._space = space
        self._finished: dict[int, float | None] = {}
        self._steps = 0
        self._points = shuffled(space.size, seed)
        self._first = max(1, first)
        self._rung = 0
        self._waiting: list[Trial] = []
        self._scores: list[tuple[float, int]] = []
        self._dry = 0

    def ask(self, count: int) -> list[Trial]:
        """Further points of this rung; the first ones of the next when all of this one have been told."""
        if self._rung == 0:
            missing = self._first - len(self._scores)
            taken = [Trial(p, _RUNGS[0]) for _, p in zip(range(min(count, missing)), self._points, strict=False)]
            if taken and self._dry < PATIENCE:
                return taken
        if not self._waiting and not self._climb():
            return []
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def _climb(self) -> bool:
        if self._rung + 1 >= len(_RUNGS):
            return self._step()
        if not self._scores:
            return False
        keep = max(1, -(-len(self._scores) // _KEEP))
        self._rung += 1
        self._waiting = [Trial(point, _RUNGS[self._rung]) for _, point in sorted(self._scores)[:keep]]
        self._scores = []
        return True

    def _step(self) -> bool:
        """Turn to the neighbours of the best point so far that were not looked at on all shapes."""
        known = [(score, point) for point, score in self._finished.items() if score is not None]
        if not known or self._steps >= _MOST_STEPS:
            return False
        self._steps += 1
        best = min(known)[1]
        self._waiting = [Trial(point) for point in neighbours(self._space, best) if point not in self._finished]
        return bool(self._waiting)

    def tell(self, trial: Trial, score: float | None) -> None:
        """Note a score."""
        if trial.share >= 1.0:
            self._finished[trial.point] = score
        self._dry = self._dry + 1 if score is None else 0
        if score is not None:
            self._scores.append((score, trial.point))


def neighbours(space: Space, point: int) -> list[int]:
    """Points that differ in one parameter: by one place in the list, or by any where the list is short."""
    choices = space.choices(point)
    found = []
    for index, axis in enumerate(space.axes):
        for choice in range(len(axis.values)):
            if choice != choices[index] and (len(axis.values) <= _SHORT or abs(choice - choices[index]) == 1):
                found.append(space.point_of((*choices[:index], choice, *choices[index + 1 :])))
    return found


class Optuna:
    """Optuna's tree-structured Parzen estimator, by its ask and tell."""

    def __init__(self, space: Space, seed: int):
        try:
            import optuna
        except ImportError as error:
            raise ToolchainError("the strategy optuna needs the Python package optuna: pip install 'kdgen[sweep]'") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space = space
        self._failed: Any = optuna.trial.TrialState.FAIL
        self._study: Any = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=16, constant_liar=True))
        self._distributions = {
            axis.path: optuna.distributions.CategoricalDistribution(list(range(len(axis.values)))) for axis in space.axes
        }
        self._trials: dict[int, list[Any]] = {}
        self._told = 0

    def ask(self, count: int) -> list[Trial]:
        """What the sampler wants to know; each trial of a batch is sampled with the others in mind."""
        if self._told >= _LEARNER_PATIENCE:
            return []
        found = []
        for _ in range(count):
            trial = self._study.ask(self._distributions)
            point = self._space.point_of(tuple(trial.params[axis.path] for axis in self._space.axes))
            self._trials.setdefault(point, []).append(trial)
            found.append(Trial(point))
        return found

    def tell(self, trial: Trial, score: float | None) -> None:
        """Pass a score on."""
        self._told = self._told + 1 if score is None else 0
        asked = self._trials[trial.point].pop(0)
        if score is None:
            self._study.tell(asked, state=self._failed)
        else:
            self._study.tell(asked, score)


def rung_shapes(names: Sequence[str], share: float) -> tuple[str, ...]:
    """The first shapes that make up `share` of all, at least one."""
    return tuple(names[: max(1, round(len(names) * share))])
