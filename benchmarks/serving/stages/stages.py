"""Suite `serving_stages`: CPU microseconds a request by stage under load, user and system time apart.

How much each of our processes takes is the kernel's own count, as in suite `request_budget`. What it takes it for is the share
of perf's samples, of the same load.
"""

import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator

from benchmarks.records.record import Record, record
from benchmarks.serving.request_budget import Plan, asked, measured, parts_of
from benchmarks.serving.stages.perf_samples import ENVIRONMENT, Sample, sampled
from benchmarks.serving.stages.stage_of import STAGES, function_of, stage_of
from benchmarks.serving.systems import our_config, our_server, settle
from deployments.serve.host import free_ports

_SAMPLED = ("haproxy", "ingress", "engine", "replica")
_FUNCTIONS = 12
_MOST_ROWS = 49_152  # of the 65,536 that may wait: what refusals cost would be counted to those that are answered


def run(plan: Plan, perf: str, said: Callable[[str], None]) -> Iterator[Record]:
    """Yields a record a way, form, number of candidates and connections. perf: the program.

    cpu_us: user and system microseconds a request, by stage. functions: those that take the most, (stage, name, microseconds).

    Raises:
        RuntimeError: there is no perf, or it cannot sample here; or this Python does not name its functions to it.
    """
    if shutil.which(perf) is None:
        raise RuntimeError(f"serving_stages: got no program {perf!r}, expected Linux's perf")
    if sys.version_info < (3, 12):
        raise RuntimeError(f"serving_stages: got Python {sys.version.split()[0]}, expected 3.12, which names functions to perf")
    (direct,) = free_ports(1)
    config = our_config(plan.system, plan.bundle, plan.device, 1, plan.ingress) | {"http": {"direct_port": direct}}
    with our_server(config, ENVIRONMENT) as server:
        for ask in asked(plan, server, direct):
            for connections in {min(most, max(1, _MOST_ROWS // ask.rows)): None for most in plan.connections}:
                settle(server)
                parts = parts_of(server)
                with sampled(perf, [pid for pid, part in parts.items() if part in _SAMPLED], plan.seconds) as samples:
                    load, by_part, stolen = measured(plan, ask, connections, 0.0)
                cpu_us, functions = by_stage(samples, parts, by_part)
                told = ", ".join(f"{stage} {sum(us):.1f}" for stage, us in cpu_us.items())
                whose = f"{ask.way} {ask.form} {ask.rows} x{connections}"
                said(f"{whose}: {load.requests_per_s:.0f}/s, {len(samples)} samples: {told}")
                yield record(
                    "serving_stages", plan.system, model="demo", batch=ask.rows, times=load.times, max_abs_err=ask.worst,
                    cell={"form": ask.form, "way": ask.way, "connections": connections, "ingress": plan.ingress},
                    rows_per_s=load.requests_per_s * ask.rows, requests_per_s=round(load.requests_per_s, 1), cpu_us=cpu_us,
                    functions=functions, samples=len(samples), failed=load.failed, stolen=round(stolen, 4),
                )  # fmt: skip


def by_stage(
    samples: list[Sample], parts: dict[int, str], by_part: dict[str, tuple[float, float]]
) -> tuple[dict[str, tuple[float, float]], list[tuple[str, str, float]]]:
    """User and system microseconds by stage, and the functions that take the most, from what each part takes in all.

    What Ray's own processes take, of which no samples are taken, is stage "ray".
    """
    counts = {part: Counter[tuple[str, bool, str]]() for part in by_part}
    for sample in samples:
        part = parts.get(sample.pid)
        if part is None:  # a program that one of ours has run meanwhile
            continue
        counts[part][stage_of(sample, part), sample.in_kernel, function_of(sample)] += 1
    stages = {stage: [0.0, 0.0] for stage in STAGES}
    functions = Counter[tuple[str, str]]()
    for part, (user, system) in by_part.items():
        if not counts[part]:
            unknown = "rest" if part in _SAMPLED else "ray"
            stages[unknown][0] += user
            stages[unknown][1] += system
            continue
        each = (user + system) / counts[part].total()
        for (stage, in_kernel, function), count in counts[part].items():
            stages[stage][in_kernel] += count * each
            functions[stage, function] += count * each  # type: ignore[assignment]  # a Counter adds what it is given
    cpu_us = {stage: (round(user, 2), round(system, 2)) for stage, (user, system) in stages.items()}
    return cpu_us, [(stage, name, round(us, 2)) for (stage, name), us in functions.most_common(_FUNCTIONS)]
