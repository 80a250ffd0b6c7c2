"""The folder of the files: whole ones alone, under names that sort by time, and never more bytes than allowed.

Replicas of a host may share it. A file appears under its name when it is complete, so a reader never meets half of one.
"""

import contextlib
import os
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

_STALE_S = 3600.0  # after so long an unfinished file is that of a process that died


class LogFolder:
    """Files lie in `model=NAME/version=VERSION/`, as readers of partitioned data expect. They are this user's alone."""

    def __init__(self, folder: str, max_mb: int) -> None:
        """Raises OSError where the folder cannot be made."""
        self._folder, self._max_bytes = Path(folder), max_mb * 10**6
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._own = secrets.token_hex(4)
        self._count = 0

    def write(self, model: str, version: str, rows: pa.Table) -> Path:
        """A new file of these rows, once there is room for it.

        Raises:
            OSError: it cannot be written; nothing of it is left.
        """
        where = self._folder / f"model={model}" / f"version={quote(version, safe='')}"
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._count += 1
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{self._own}-{self._count:06}.parquet"
        unfinished = where / f".{name}.part"
        try:
            with os.fdopen(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                pq.write_table(rows, file, compression="zstd")
            self._make_room(unfinished)
            os.replace(unfinished, where / name)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        return where / name

    def _make_room(self, new: Path) -> None:
        """Deletes the oldest files, and unfinished ones that nobody finishes, until all that stay fit."""
        sizes: dict[Path, tuple[float, int]] = {}
        for path in (
            *self._folder.glob("model=*/version=*/*.parquet"),
            *self._folder.glob("model=*/version=*/.*.parquet.part"),
        ):
            with contextlib.suppress(FileNotFoundError):  # another replica has just deleted it
                about = path.stat()
                sizes[path] = about.st_mtime, about.st_size
        stale = [p for p, (at, _) in sizes.items() if p.name.endswith(".part") and at < time.time() - _STALE_S]
        total = sum(size for _, size in sizes.values())
        whole = sorted((p for p in sizes if p.name.endswith(".parquet")), key=lambda p: (sizes[p][0], p.name))
        for path in (*stale, *whole):
            if path in stale or total > self._max_bytes:
                path.unlink(missing_ok=True)
                total -= sizes[path][1]
        if total > self._max_bytes:
            raise OSError(
                f"score_log.max_mb: got {self._max_bytes // 10**6}, expected room for a file of {new.stat().st_size} bytes"
            )
