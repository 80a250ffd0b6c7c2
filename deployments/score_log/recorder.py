"""Takes a sample of the scored requests and hands it to a thread, which writes it. What is more than the thread can take is
dropped and counted: a request never waits for the log, and the log's faults are none of the service's.
"""

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from random import random

import pyarrow as pa

from deployments.config_observed import ScoreLog
from deployments.score_log.log_folder import LogFolder
from deployments.score_log.scored_rows import ScoredRows
from deployments.scoring.job import Job
from deployments.scoring.served_model import ServedModel
from dpiframe_core.features.row_block import Floats

log = logging.getLogger(__name__)

_MOST_WAITING_ROWS = 65_536  # beyond them a request's rows are dropped
_TURN_S = 0.5
_TELL_EVERY_S = 60.0
_CLOSE_S = 5.0


class ScoreRecorder:
    """Owns the thread. `take` is called on the event loop, `close` writes what is left."""

    def __init__(self, config: ScoreLog, lost: Callable[[str, str, int], None] = lambda model, version, requests: None) -> None:
        """lost: told of requests of a model and version that were sampled and are not in the log, on any thread.

        Raises OSError where the folder cannot be made.
        """
        self._config, self._lost = config, lost
        self._folder = LogFolder(config.folder, config.max_mb)
        self._waiting: deque[ScoredRows] = deque()
        self._waiting_rows = 0
        self._lock = threading.Lock()
        self._tables: defaultdict[tuple[str, str], list[pa.Table]] = defaultdict(list)
        self._written_at: dict[tuple[str, str], float] = {}
        self.dropped = 0  # requests
        self._told_dropped, self._tell_at, self._why = 0, 0.0, ""  # _why: the last error, as a message ends
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="score-log", daemon=True)
        self._thread.start()

    def take(self, job: Job, served: ServedModel, scores: Floats) -> None:
        """Decides about a request, and keeps references to what it was given and to its scores."""
        if job.given is None or random() >= self._config.sample:
            return
        info, (candidates, context) = served.info, job.given
        with self._lock:
            if self._waiting_rows + len(scores) > _MOST_WAITING_ROWS:
                self._lose((info.name, info.version), 1)
                return
            self._waiting_rows += len(scores)
            schema, now = served.encoder.schema, int(time.time() * 1e3)
            rows = ScoredRows(info.name, info.version, info.tasks, schema, job.request_id, now, candidates, context, scores)
            self._waiting.append(rows)

    def close(self) -> None:
        """Waits for what is left to be written, unless the disk stalls."""
        self._stop.set()
        self._thread.join(_CLOSE_S)

    def _work(self) -> None:
        last = False
        while not last:
            last = self._stop.wait(_TURN_S)
            try:
                self._take_in()
                self._write(everything=last)
            except Exception:  # a row that cannot be written must not end the log
                log.exception("scored rows are lost")
            self._tell()

    def _take_in(self) -> None:
        for _ in range(len(self._waiting)):
            with self._lock:
                rows = self._waiting.popleft()
                self._waiting_rows -= len(rows.scores)
            of = rows.model, rows.version
            try:
                self._tables[of].append(rows.table())
            except Exception:
                self._lose(of, 1)
                raise
            self._written_at.setdefault(of, time.monotonic())

    def _write(self, *, everything: bool) -> None:
        now = time.monotonic()
        for of, tables in list(self._tables.items()):
            full = sum(table.num_rows for table in tables) >= self._config.file_rows
            if everything or full or now - self._written_at[of] >= self._config.every_s:
                del self._tables[of], self._written_at[of]
                try:
                    self._folder.write(*of, pa.concat_tables(tables).combine_chunks())
                except OSError as error:
                    self._why = f": {error}"
                    self._lose(of, len(tables))

    def _lose(self, of: tuple[str, str], requests: int) -> None:
        self.dropped += requests
        self._lost(*of, requests)

    def _tell(self) -> None:
        now = time.monotonic()
        if self.dropped > self._told_dropped and now >= self._tell_at:
            log.warning("%d sampled requests are not in the score log%s", self.dropped - self._told_dropped, self._why)
            self._why, self._told_dropped, self._tell_at = "", self.dropped, now + _TELL_EVERY_S
