"""What `dpiframe score` does in this process: threads that encode and score chunks of a file, side by side and in order.

Knows no command line and no Ray.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext

import torch

from deployments.offline.chunk_scorer import ChunkScorer, ScoredChunk
from deployments.offline.score_job import Progress, ScoreJob, plan_job
from deployments.offline.scored_file import ScoreReport, scored_file
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.files.row_files import Chunk, iter_chunks
from dpiframe_core.machine.one_thread import one_thread
from kernels.runtime.cores import usable_cores


def score_file(job: ScoreJob, progress: Progress, threads: int = 0) -> ScoreReport:
    """Runs a job.

    Args:
        threads: that encode and score; 0: one a core, or four for a GPU.

    Raises:
        InputError: as `plan_job`, or a bad row, named by file, row and column; nothing is left of the output then.
        BundleError: the bundle is faulty.
    """
    bundle = read_bundle(job.bundle)
    plan = plan_job(job, bundle.manifest)
    on_cpu = job.device == "cpu" or not torch.cuda.is_available()
    threads = threads or (usable_cores() if on_cpu else 4)
    with (
        one_thread() if on_cpu else nullcontext(),  # a core for each chunk: sharing one layer, they wait after every layer
        closing(ChunkScorer(job, plan, bundle, threads if on_cpu else 2)) as scorer,
        scored_file(job.out, plan) as out,
    ):
        for chunk, scored in _in_order(iter_chunks(plan.file, job.chunk_rows), scorer, threads):
            out.add(scored.table, scored.scores, scored.labels, scored.oov_count)
            progress(chunk.done, out.rows)
    return out.report(job.out)


def _in_order(chunks: Iterable[Chunk], scorer: ChunkScorer, threads: int) -> Iterator[tuple[Chunk, ScoredChunk]]:
    """Scores chunks on threads, at most two a thread under way, and yields them in the order in which they came."""
    under_way: deque[tuple[Chunk, Future[ScoredChunk]]] = deque()
    with ThreadPoolExecutor(threads, "score") as pool:
        try:
            for chunk in chunks:
                under_way.append((chunk, pool.submit(scorer, chunk.table, chunk.first_row.__add__)))
                if len(under_way) >= 2 * threads:
                    first, future = under_way.popleft()
                    yield first, future.result()
            while under_way:
                first, future = under_way.popleft()
                yield first, future.result()
        finally:
            for _, future in under_way:
                future.cancel()
