"""Experiment trackers: TensorBoard, and registered ones.

TensorBoard uses its own event writer, without torch. The iterations that a run repeats are purged.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.text.summary import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from spotlight.registry import SINKS
from spotlight.store.metrics import FinalTable, MetricsRow, Sink
from spotlight.store.run_directory import RunPaths
from spotlight.store.shown_media import ShownMedia, shown_media
from spotlight_rewards.base.file_errors import StoreError, storage_errors

Options = Mapping[str, Mapping[str, Any]]
"""Options by sink name."""


def check_sinks(chosen: Options) -> None:
    """Check before any work that the sinks can be opened.

    Raises:
        RegistryError: unknown sink.
        StoreError: unknown option, or missing package.
    """
    for name, options in chosen.items():
        factory = SINKS.load(name)
        signature = inspect.signature(factory)
        try:
            signature.bind(None, resume_at=0, **options)
        except TypeError as error:
            taken = [key for key in signature.parameters if key not in {"paths", "resume_at"}]
            raise StoreError(
                f"metrics.sinks.{name} is {dict(options)!r} ({error}); expected "
                f"{', '.join(taken) or 'no options'}. Correct its options."
            ) from None
        if check := getattr(factory, "check", None):
            check()


def open_sinks(chosen: Options, paths: RunPaths, *, resume_at: int) -> tuple[Sink, ...]:
    """Open an attempt's sinks, already checked by :func:`check_sinks`. Raises :class:`StoreError`."""
    return tuple(SINKS.load(name)(paths, resume_at=resume_at, **options) for name, options in chosen.items())


class TensorBoard:
    """Event files for ``tensorboard --logdir``; the step is the iteration."""

    def __init__(self, paths: RunPaths, *, resume_at: int) -> None:
        """Open an event file. Raises :class:`StoreError` if the disk is full or not writable."""
        self._paths = paths
        with storage_errors("cannot write the curves", paths.tensorboard):
            self._writer = EventFileWriter(str(paths.tensorboard))
            self.rewind(resume_at)

    def write(self, row: MetricsRow) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
        self._add(row.iteration, Summary(value=values))

    def pictures(self, iteration: int) -> None:
        self.training_pictures(iteration, shown_media(self._paths, iteration))

    def training_pictures(self, iteration: int, shown: Sequence[ShownMedia]) -> None:
        if shown:
            self._add(iteration, Summary(value=[_image(each) for each in shown]))

    def table(self, iteration: int, table: FinalTable) -> None:
        lines = (table.columns, ("---",) * len(table.columns), *table.rows)
        self._add(iteration, text_pb("summary", "\n".join(f"| {' | '.join(line)} |" for line in lines)))

    def rewind(self, iteration: int) -> None:
        """Purge what is written from an iteration on."""
        purge = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=iteration, session_log=purge))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, iteration: int, summary: Summary) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=iteration, summary=summary))


def _image(shown: ShownMedia) -> Summary.Value:
    width, height = shown.size
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=shown.content)
    about = SummaryMetadata(display_name=shown.tag, summary_description=shown.caption)
    return Summary.Value(tag=shown.tag, image=image, metadata=about)
