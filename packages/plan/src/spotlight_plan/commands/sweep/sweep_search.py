"""Optuna as the source of a sweep's runs. Its study is a file beside them, so that a killed search goes on.

Trials that were begun and not told are taken up first: their runs have the same names, and resume.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlight_plan.commands.sweep.sweep_processes import in_use
from spotlight_plan.sweep_file import (
    FINISHED,
    NOT_BEGUN,
    Between,
    OptunaSection,
    SweepFile,
    SweepRun,
    sweep_run,
)
from spotlight_rewards.base.errors import ConfigError, Problem, UserError

if TYPE_CHECKING:
    import optuna

_INSTALL = "pip install 'spotlight-rl[sweep]'"
_UNDO = "Undo the change, or give the sweep another name."


def require_optuna() -> None:
    """Raise UserError where it is not installed."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise UserError(f"search needs Optuna, which is not installed: {_INSTALL}.") from error


class Search:
    """A study of one sweep. Raises UserError without Optuna, or for a study that is not this one."""

    def __init__(self, sweep: SweepFile, runs_dir: Path) -> None:
        require_optuna()
        import optuna

        assert sweep.search is not None, "a sweep that searches"
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._sweep, self._section, self._runs_dir = sweep, sweep.search, runs_dir
        self._trials: defaultdict[str, list[int]] = defaultdict(list)
        file = (runs_dir / f"{sweep.name}.optuna.sqlite").absolute()
        try:
            runs_dir.mkdir(parents=True, exist_ok=True)
            self._study = optuna.create_study(
                storage=f"sqlite:///{file}",
                study_name=sweep.name,
                direction=self._section.goal,
                load_if_exists=True,
            )
        except Exception as error:  # of SQLAlchemy, which Optuna stores with
            raise UserError(
                f"{file}: cannot be used as Optuna's study ({str(error).splitlines()[0]}); expected one, or "
                "no file. Restore it, or give the sweep another name."
            ) from error
        if (begun := self._study.direction.name.lower()) != self._section.goal:
            problem = Problem("search.goal", self._section.goal, f"{begun}, as it was begun with", _UNDO)
            raise ConfigError(f"the search {sweep.name}", [problem])
        # Another seed each time, or a search that goes on would draw what it has drawn.
        seed = self._section.seed + len(self._study.trials)
        self._study.sampler = optuna.samplers.TPESampler(seed=seed)

    def runs(self) -> Iterator[SweepRun]:
        """Of trials begun before, then new ones up to the number wanted. Raises ConfigError."""
        for trial in self._study.trials:
            run = sweep_run(self._sweep, self._settings(trial.params))
            if not trial.state.is_finished() and in_use(self._runs_dir, run.name) is None:
                yield self._named(run, trial.number)
        while len(self._study.trials) < self._section.trials:
            asked = self._asked()
            yield self._named(sweep_run(self._sweep, self._settings(asked.params)), asked.number)

    def known(self) -> list[tuple[SweepRun, str]]:
        """The runs of all trials so far, once each, and how they ended."""
        from optuna.trial import TrialState

        words = {TrialState.COMPLETE: FINISHED, TrialState.FAIL: "failed"}
        found = {
            (run := sweep_run(self._sweep, self._settings(trial.params))).name: (run, trial.state)
            for trial in self._study.trials
        }
        return [(run, words.get(state, NOT_BEGUN)) for run, state in found.values()]

    def tell(self, run: SweepRun, score: float | None) -> None:
        """What a run ended with; None: it failed. Trials of equal settings have one run."""
        from optuna.trial import TrialState

        state = TrialState.FAIL if score is None else TrialState.COMPLETE
        for number in self._trials.pop(run.name, ()):
            self._study.tell(number, score, state=state, skip_if_finished=True)

    def _named(self, run: SweepRun, number: int) -> SweepRun:
        self._trials[run.name].append(number)
        return run

    def _asked(self) -> optuna.Trial:
        from optuna import distributions as of

        def distribution(key: str, each: Between | list[Any]) -> of.BaseDistribution:
            if not isinstance(each, Between):
                return of.CategoricalDistribution(each)
            if each.whole:
                return of.IntDistribution(int(each.low), int(each.high), log=each.log)
            return of.FloatDistribution(each.low, each.high, log=each.log)

        try:
            return self._study.ask(
                {key: distribution(key, each) for key, each in self._section.space.items()}
            )
        except ValueError as error:
            problem = Problem("search.space", str(error), "the space it was begun with", _UNDO)
            raise ConfigError(f"the search {self._sweep.name}", [problem]) from error

    def _settings(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {key: params[key] for key in self._section.space if key in params}


def score_of(section: OptunaSection, directory: Path) -> float | None:
    """What a finished run is judged by; None: it has no such score."""
    from spotlight.report.record import read_run

    record = read_run(directory)
    if not record.validations:
        return None
    scores = record.validations[-1].scores
    found = scores.get(section.score or record.curves[0])
    return None if found is None else found.mean
