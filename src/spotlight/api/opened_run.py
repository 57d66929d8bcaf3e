""":class:`Run`: a run's directory as Python sees it, also while it works."""

from __future__ import annotations

import html
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spotlight.api.arguments import overrides_of, require_kind
from spotlight.store.run_directory import RunPaths
from spotlight.store.run_store import Wanted, stored_run, stored_runs
from spotlight_rewards.base.file_errors import StoreError

if TYPE_CHECKING:
    from pandas import DataFrame

    from spotlight.report.record import RunRecord
    from spotlight.store.ledger.ledger_audit import AuditReport

log = logging.getLogger("spotlight")
_AT = ("iteration", "samples_trained", "wall_s")


@dataclass(frozen=True)
class Run:
    """A run directory. Properties read it when they are asked.

    Attributes:
        directory: of a run in a bucket, the copy of what was asked for, which every question renews.
        address: where it is kept; None: in the directory.
    """

    directory: Path
    address: str | None = None

    def _bring(self, wanted: Wanted) -> Path:
        """The directory, with what is wanted as new as it is kept. Raises StoreError."""
        if self.address is not None:
            stored_run(self.address, wanted)
        return self.directory

    @property
    def _place(self) -> list[str]:
        """Of a run that is kept elsewhere, what its configuration says of that."""
        return [] if self.address is None else [f"runs_dir={Path(self.address).parent}"]

    @property
    def record(self) -> RunRecord:
        """Configuration, history and validations, as the closing screen sees them."""
        from spotlight.report.record import read_run

        return read_run(self._bring(Wanted.LIGHT))

    @property
    def finished(self) -> bool:
        """Whether all iterations are trained."""
        return self.record.history.state == "finished"

    @property
    def metrics(self) -> DataFrame:
        """A row per iteration, a column per curve."""
        return _frame(({**_at(row), **row.values} for row in self.record.rows), _AT)

    @property
    def evaluations(self) -> DataFrame:
        """A row per validation: the mean of each curve, and its standard error as ``CURVE_stderr``."""
        rows = (
            _at(row)
            | {name: mean.mean for name, mean in row.scores.items()}
            | {f"{name}_stderr": mean.stderr for name, mean in row.scores.items()}
            for row in self.record.validations
        )
        return _frame(rows, _AT)

    @property
    def samples(self) -> DataFrame:
        """A row per rollout of the ledger, with its reward where it has one."""
        from spotlight.store.ledger import ledger_queries as queries
        from spotlight_rewards.reward_config import REWARD

        with closing(queries.open_readonly(RunPaths(self._bring(Wanted.LIGHT)).ledger)) as connection:
            found = connection.execute(
                "SELECT rollouts.id, purpose, iteration, prompts.text AS prompt, member, seed, steps, "
                "version, value AS reward FROM rollouts JOIN prompts ON prompts.id = rollouts.prompt "
                "LEFT JOIN rewards ON rollout = rollouts.id AND name = ? ORDER BY rollouts.seq",
                (REWARD,),
            )
            names = [each[0] for each in found.description]
            return _frame((dict(zip(names, row, strict=True)) for row in found), names)

    def pictures(self, iteration: int) -> Path:
        """The grid of held-out pictures after so many iterations. Raises StoreError if there is none."""
        require_kind("pictures", "iteration", iteration, Integral, "a number of iterations")
        path = RunPaths(self._bring(Wanted.PICTURES)).images / f"iteration-{iteration:06d}.png"
        if not path.is_file():
            found = sorted(each.stem for each in path.parent.glob("iteration-*.png"))
            raise StoreError(f"{path}: no such pictures; expected one of {', '.join(found) or 'none'}.")
        return path

    def training_pictures(self, iteration: int) -> DataFrame:
        """A row for the best and the worst picture of a few groups trained in an iteration, with all rewards.

        Raises StoreError if none were kept of it.
        """
        from spotlight.store.images import drawn_iterations, read_tile_note
        from spotlight.store.picture_names import TRAINING, tiles_of
        from spotlight.store.shown_media import place_of

        require_kind("training_pictures", "iteration", iteration, Integral, "an iteration's number")
        paths = RunPaths(self._bring(Wanted.PICTURES))
        notes = [note for each in tiles_of(paths, iteration, TRAINING) if (note := read_tile_note(each))]
        if not notes:
            found = ", ".join(map(str, drawn_iterations(paths, TRAINING)))
            raise StoreError(
                f"{paths.images}: no pictures of iteration {iteration}'s groups; expected one of "
                f"{found or 'none: metrics.training_pictures_every says when they are kept'}."
            )
        rows = (
            {
                "prompt": note.caption,
                "place": place_of(note.path)[1],
                "path": note.path,
                "rollout": note.rollout,
                **note.scores,
            }
            for note in notes
        )
        return _frame(rows, ())

    @property
    def lora(self) -> Path | None:
        """Folder for ``load_lora_weights``; None before the end, and of a full fine-tune."""
        folder = self._bring(Wanted.LORA) / "lora"
        return folder if folder.is_dir() else None

    def train(self, *, plain: bool = False, **keys: Any) -> Run:
        """Go on, with other values of these keys from here on: ``learner={"learning_rate": 1e-4}``.

        Raises:
            OtherConfigurationError: a key cannot change; the message names the ways out.
        """
        from spotlight.api.train_run import trained
        from spotlight.config.load import load_run

        require_kind("train", "plain", plain, bool, "True or False")
        run = self._bring(Wanted.LIGHT)
        return trained(load_run(run, [*self._place, *overrides_of(keys)]), plain=plain)

    def fork(self, name: str, *, iteration: int | None = None, **keys: Any) -> Run:
        """Another run beside this one, from its checkpoint after ``iteration`` (None: the newest).

        Call :meth:`train` of it to go on.

        Raises:
            OtherConfigurationError: a key is changed that the saved weights are of.
            StoreError: no such checkpoint, or another run has this name.
        """
        from spotlight.cli.runs.train import in_a_folder
        from spotlight.config.load import load_run
        from spotlight.runtime.resuming.course import fork

        require_kind("fork", "iteration", iteration, Integral | None, "a checkpoint's iteration")
        run = self._bring(Wanted.ALL)
        config = load_run(run, [*self._place, *overrides_of({**keys, "name": name})], forks=True)
        with in_a_folder(config, log.info) as local:
            fork(run, local, iteration)
        return open(config.runs_dir / name)

    def export(
        self,
        directory: str | Path,
        *,
        iteration: int | None = None,
        best: str | bool = False,
        merged: bool = False,
        device: Literal["auto", "cpu", "cuda"] = "auto",
    ) -> Path:
        """Write a LoRA, or with ``merged`` a whole pipeline, for diffusers.

        A LoRA that was trained beside a base in few bits is logged as such, as ``spotlight export`` says it.

        Args:
            iteration: of the checkpoint; default: the newest.
            best: the kept checkpoint with the best validation; a text names the curve.

        Raises:
            StoreError, ModelError: as ``spotlight export``.
        """
        from spotlight.report.loading import whole_base_note
        from spotlight.runtime.inference import TrainedRun

        require_kind("export", "directory", directory, str | Path, "a folder's path")
        require_kind("export", "iteration", iteration, Integral | None, "a checkpoint's iteration")
        require_kind("export", "best", best, str | bool, "True, False, or a curve's name")
        require_kind("export", "merged", merged, bool, "True or False")
        require_kind("export", "device", device, ("auto", "cpu", "cuda"), "auto, cpu or cuda")
        by = (best if isinstance(best, str) else "") if best else None
        run = self._bring(Wanted.CHECKPOINT if iteration is None and not best else Wanted.ALL)
        trained = TrainedRun.open(run, device=device, iteration=iteration, best=by)
        if merged:
            trained.export_merged(Path(directory))
        else:
            trained.export_lora(Path(directory))
        if note := whole_base_note(trained.config):
            log.warning(note)
        return Path(directory)

    def audit(self) -> AuditReport:
        """Recount the ledger. Raises StoreError if there is none."""
        from spotlight.cli.runs.audit import audit_run

        return audit_run(self._bring(Wanted.CHECKPOINT))

    def _repr_html_(self) -> str:
        from spotlight.report.wording import plural

        record = self.record
        rows = "".join(
            f"<tr><td>{row.iteration}</td>"
            + "".join(f"<td>{row.scores[curve].mean:.3f}</td>" for curve in record.curves)
            + "</tr>"
            for row in record.validations
        )
        head = "".join(f"<th>{html.escape(curve)}</th>" for curve in record.curves)
        name = html.escape(
            f"{record.config.name}: {plural(record.history.iterations, 'iteration')}, {record.history.state}"
        )
        return f"<b>{name}</b><table><tr><th>iteration</th>{head}</tr>{rows}</table>"


def _at(row: object) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _AT}


def _frame(rows: Iterable[Mapping[str, Any]], first: Sequence[str]) -> DataFrame:
    """Of a run that has just begun too, which has the ``first`` columns and no row."""
    from pandas import DataFrame  # slow to import

    return DataFrame(list(rows) or {name: [] for name in first})


def open(directory: str | Path) -> Run:
    """A run that has been started: its directory, its name in ``runs/``, or ``s3://BUCKET/PREFIX/NAME``.

    Raises StoreError if there is none.
    """
    from spotlight.cli.run_argument import run_named

    require_kind("open", "directory", directory, str | Path, "a run's directory, name or address")
    text = str(directory)
    if (kept := stored_runs(Path(text).parent)) is not None:
        text = f"{kept.address}/{Path(text).name}"
    if (copy := stored_run(text, Wanted.LIGHT)) is not None:
        return Run(copy, text)
    if (path := run_named(text)) is None:
        raise StoreError(f"{text}: not a run directory (no config.yaml); see `spotlight runs`.")
    return Run(path)
