"""A request's CPU time goes to the stages that its samples are of, and to none twice."""

import re
from pathlib import Path
from typing import cast

import pytest

from benchmarks.serving.request_budget import PARTS, Plan
from benchmarks.serving.stages import stage_of as rules
from benchmarks.serving.stages.perf_samples import Frame, Sample, sampled, samples_in
from benchmarks.serving.stages.stage_of import STAGES, function_of, stage_of
from benchmarks.serving.stages.stages import by_stage, run

ROOT = Path(__file__).parents[3]
LISTENER = "/root/.cache/dpiframe/listener-0f.so"
SAID = """ray::IDLE  2799/3624  task-clock:
\tffffffff8145 tcp_sendmsg_locked ([kernel.kallsyms])
\tffffffff8146 __x64_sys_sendmsg ([kernel.kallsyms])
\t        1199 __sendmsg (/usr/lib/x86_64-linux-gnu/libc.so.6)
\t        2199 dpi_first_pushed (/root/.cache/dpiframe/listener-0f.so)
\t    7fbc956d py::DirectServer._round:/srv/deployments/direct/direct_server.py (/tmp/perf-2799.map)

haproxy  3980/3981  task-clock:
\t      1c8147 h1_headers_to_hdr_list (/srv/haproxy)

ray::ServeReplica:a b  2795/2795  task-clock:
\t          10 std::function<void (int, int)>::operator() (/srv/torch/lib/libtorch_cpu.so)

"""


def at(*frames: tuple[str, str], pid: int = 7) -> Sample:
    return Sample(pid, tuple(Frame(symbol, file) for symbol, file in frames))


def python(named: str) -> tuple[str, str]:
    return f"py::{named}", "/tmp/perf-7.map"


def test_what_perf_prints_is_read_frame_by_frame() -> None:
    kernel, haproxy, torch = samples_in(SAID.splitlines(keepends=True))
    assert [s.pid for s in (kernel, haproxy, torch)] == [2799, 3980, 2795]
    assert [s.in_kernel for s in (kernel, haproxy, torch)] == [True, False, False]
    assert [f.symbol for f in kernel.frames[:2]] == ["tcp_sendmsg_locked", "__x64_sys_sendmsg"]
    assert kernel.frames[3] == Frame("dpi_first_pushed", LISTENER)
    assert torch.frames == (Frame("std::function<void (int, int)>::operator()", "/srv/torch/lib/libtorch_cpu.so"),)
    assert function_of(kernel) == "dpi_first_pushed > sendmsg"


@pytest.mark.parametrize(
    ("sample", "part", "stage"),
    [
        (at(("h1_send", "/srv/haproxy")), "haproxy", "haproxy"),
        (at(("__x64_sys_recvfrom", "[kernel.kallsyms]"), ("dpi_pulled", LISTENER)), "ingress", "sockets"),
        (at(("dpi_http_head", LISTENER), ("dpi_taken", LISTENER)), "ingress", "parse"),
        (at(("memcpy", "/usr/lib/libc.so.6"), ("dpi_form_encoded", LISTENER)), "ingress", "encode"),
        (at(("__x64_sys_write", "[kernel.kallsyms]"), ("dpi_ring_tell", LISTENER)), "ingress", "ring"),
        (at(("header", "/usr/lib/other.so"), python("RowQueue.push:/x/deployments/batching/row_queue.py")), "engine", "batch"),
        (at(python("_numbers.<locals>.read:/x/dpiframe_core/features/multi_column_readers.py")), "ingress", "encode"),
        (at(python("RowBlock.check:/x/dpiframe_core/features/row_block.py")), "ingress", "encode"),
        (at(python("RowBlock.check:/x/dpiframe_core/features/row_block.py")), "engine", "batch"),
        (at(python("json_answer:/x/deployments/http_api/answers.py")), "ingress", "answer"),
        (at(python("_batch:/x/deployments/http_api/arrow_body.py")), "ingress", "validate"),
        (at(python("CudaLane.run:/x/dpiframe_core/engine/cuda_lane.py")), "engine", "model"),
        (at(("run", "/x/ray/_raylet.so")), "ingress", "ray"),
        (at(python("cached_property.__get__:/usr/lib/python3.12/functools.py")), "ingress", "rest"),
        (Sample(7, ()), "ingress", "rest"),
    ],
)  # fmt: skip
def test_a_sample_is_of_one_stage(sample: Sample, part: str, stage: str) -> None:
    assert stage_of(sample, part) == stage
    assert stage in STAGES


def test_the_stages_take_what_the_processes_take() -> None:
    sockets = at(("__x64_sys_sendmsg", "[kernel.kallsyms]"), ("dpi_first_pushed", LISTENER), pid=1)
    samples = [*[sockets] * 3, at(("dpi_http_head", LISTENER), pid=1), at(("h1_send", "/srv/haproxy"), pid=2)]
    samples.append(at(("main", "/usr/bin/cc"), pid=3))  # a program that one of these has run
    spent = dict.fromkeys(PARTS, (0.0, 0.0)) | {
        "ingress": (6.0, 2.0),
        "haproxy": (20.0, 21.0),
        "rest": (3.0, 1.5),
        "engine": (0.5, 0.0),
    }
    cpu_us, functions = by_stage(samples, {1: "ingress", 2: "haproxy", 9: "rest"}, spent)
    assert cpu_us["sockets"] == (0.0, 6.0)  # three of four samples of 8 us, all in the kernel
    assert cpu_us["parse"] == (2.0, 0.0)
    assert cpu_us["haproxy"] == (41.0, 0.0)
    assert cpu_us["ray"] == (3.0, 1.5)
    assert cpu_us["rest"] == (0.5, 0.0)  # of a process that ran and was not seen
    assert sum(map(sum, cpu_us.values())) == pytest.approx(sum(map(sum, spent.values())))
    assert functions == [
        ("haproxy", "h1_send", 41.0), ("sockets", "dpi_first_pushed > sendmsg", 6.0), ("parse", "dpi_http_head", 2.0)
    ]  # fmt: skip


def test_every_function_and_every_file_of_the_rules_is_there() -> None:
    """A name that has changed would quietly move its time to another stage."""
    folders = ("deployments/direct/native", "deployments/fanin", "kernels/copies")
    c = "\n".join(path.read_text() for folder in folders for path in (ROOT / folder).glob("*.[ch]"))
    assert [name for name in rules._OF_C if not re.search(rf"\b{name}\(", c)] == []
    files = [path for floor in ("deployments", "dpiframe_core", "kernels") for path in (ROOT / floor).rglob("*.py")]
    python, paths = "\n".join(path.read_text() for path in files), "\n".join(str(path.relative_to(ROOT)) for path in files)
    parts = [part for _, parts in rules._OF_PYTHON for part in parts]
    functions = [part.rstrip(":").rpartition(".")[2] for part in parts if part.endswith(":")]
    assert [name for name in functions if f"def {name}(" not in python] == []
    assert [part for part in parts if part[0] not in "/" and "/" in part and part not in paths] == []


def test_without_perf_the_suite_says_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="got no program 'no-such-perf', expected Linux's perf"):
        next(run(cast(Plan, None), "no-such-perf", print))  # before it starts a service
    refuses = tmp_path / "perf"
    refuses.write_text("#!/bin/sh\necho no permission >&2\nexit 3\n")
    refuses.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"no permission.* 3, expected samples"), sampled(str(refuses), [1], 0.1):
        pass
