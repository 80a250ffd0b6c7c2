"""The host's stand-in for a GPU tells what a kernel may not do, and tells it as a failure of that test alone."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kernels import host_cuda

pytestmark = pytest.mark.bulk

TWO_ARRIVALS = """
    asm("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(0), "n"(1));
    for (int i = 0; i < 2; ++i) asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(0), "r"(8));
"""

NO_ARRIVAL = """
    if (threadIdx.x == 0) asm("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(0), "n"(1));
    __syncthreads();
    asm volatile("mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;" ::"r"(0), "r"(0));
"""

NO_WAIT = """
    static unsigned long long map[6] = {(unsigned long long)to, 1, 16, 16, 1, 4};
    asm("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(1016), "n"(1));
    asm("cp.async.bulk.tensor.2d.shared::cluster [%0], [%1, {%3, %4}], [%2];" ::"r"(0), "l"(map), "r"(1016), "r"(0), "r"(0));
"""


KernelOf = Callable[[str, str], host_cuda.HostKernel]


@pytest.fixture
def kernel_of(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelOf:
    """The kernel of that name in that code. All share a run's compiled header: it takes as long as the kernel."""
    monkeypatch.setattr(host_cuda, "FOLDER", tmp_path)
    (folder := run_folder / "host_cuda").mkdir(exist_ok=True)

    def kernel(name: str, code: str) -> host_cuda.HostKernel:
        own = f"{tmp_path.parent.name}-{tmp_path.name}"  # two workers number a test's folders alike
        (tmp_path / f"{own}.cu").write_text(code)
        return host_cuda.HostKernel(own, name, (), folder)

    return kernel


def test_an_asm_statement_becomes_a_call_with_its_operands_outputs_first() -> None:
    given = 'asm volatile("ld.relaxed." "gpu.global.u64 %0, [%1];" : "=l"(w) : "l"(f(at) ? a : b) : "memory");'
    assert host_cuda.translated(given) == "ptx::ld_relaxed_gpu_global_u64(w, f(at) ? a : b);"
    assert host_cuda.translated('asm("" : "+f"(d));') == "(void)0;"
    assert host_cuda.translated('asm("mystery.u32 %0, %1;" : "=r"(a) : "r"(b));') == "ptx::unsupported(a, b);"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (threadIdx.x == 0) while (*(volatile int*)to == 0) __nanosleep(1);", "wait for each other for ever"),
        ('asm("mystery.u32 %0;" : "=r"(*to));', "an instruction that host_cuda.h lacks"),
        ('asm("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(4), "l"(to));', "not aligned"),
        ('asm("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(1024), "l"(to));', "beyond what the launch asked for"),
        ('asm("bar.sync 1, %0;" ::"n"(96));', "wait for each other for ever"),
        (
            "if (threadIdx.x) __syncthreads(); else while (*(volatile int*)to == 0) __nanosleep(1);",
            "wait for each other for ever",
        ),
        (NO_ARRIVAL, "wait for each other for ever"),
        (TWO_ARRIVALS, "an arrival too many"),
        (NO_WAIT, "a block that ends before its copies have come"),
    ],
)
def test_what_a_kernel_may_not_do_fails(body: str, message: str, kernel_of: KernelOf) -> None:
    import torch

    kernel = kernel_of("wrong", f'extern "C" __global__ void wrong(unsigned* to) {{ {body} }}\n')
    to = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(AssertionError, match=message):
        kernel(2, 64, (to.data_ptr(),), 1024)


@pytest.mark.parametrize(
    ("wait", "index", "right"),
    [
        ("__syncthreads();", "(threadIdx.x + 1) % 64", True),
        ("", "(threadIdx.x + 1) % 64", False),
        ("", "(threadIdx.x + 63) % 64", False),
        ("__syncwarp();", "(threadIdx.x + 1) % 64", False),
        ("__syncwarp();", "threadIdx.x / 32 * 32 + (threadIdx.x + 1) % 32", True),
        ("__syncthreads();", "(threadIdx.x + 2) % 64", False),
    ],
)
def test_a_barrier_that_is_missing_or_too_small_and_a_wrong_index_show(
    wait: str, index: str, right: bool, kernel_of: KernelOf
) -> None:
    """In a block and in those after it, whose threads are the same fibers."""
    import torch

    kernel = kernel_of(
        "next",
        'extern "C" __global__ void next(int* to) {\n'
        "  extern __shared__ __align__(16) char shared[]; int* const words = (int*)shared;\n"
        f"  words[threadIdx.x] = threadIdx.x; {wait} to[blockIdx.x * 64 + threadIdx.x] = words[{index}];\n"
        "}\n",
    )
    to = torch.full((3, 64), -2, dtype=torch.int32)
    kernel(3, 64, (to.data_ptr(),), 256)
    at = torch.arange(64)
    want = at // 32 * 32 + (at + 1) % 32 if "/ 32" in index else (at + 1) % 64 if "63" not in index else (at + 63) % 64
    assert all(torch.equal(block.long(), want) is right for block in to)


def test_warps_exchange_words_and_blocks_count(kernel_of: KernelOf) -> None:
    import torch

    kernel = kernel_of(
        "sums",
        'extern "C" __global__ void sums(int* to) {\n'
        "  int v = threadIdx.x;\n"
        "  for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);\n"
        "  if (threadIdx.x >= 64) return;\n"
        "  const int odd = __syncthreads_count(threadIdx.x & 1), all = __syncthreads_count(1);\n"
        "  if (threadIdx.x % 32 == 0) to[blockIdx.x * 2 + threadIdx.x / 32] = v * 10000 + odd * 100 + all;\n"
        "}\n",
    )
    to = torch.zeros(6, dtype=torch.int32)
    kernel(3, 96, (to.data_ptr(),), 0)
    assert to.tolist() == [(31 * 16) * 10000 + 3264, (31 * 16 + 1024) * 10000 + 3264] * 3


def test_a_copy_comes_when_its_thread_waits_for_its_group(kernel_of: KernelOf) -> None:
    import torch

    copy = 'asm("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"({at}), "l"(from + {at} / 4)); asm("cp.async.commit_group;");'
    tell = "to[{i}] = words[0]; to[{i} + 1] = words[4];"
    kernel = kernel_of(
        "late",
        'extern "C" __global__ void late(const int* from, int* to) {\n'
        "  extern __shared__ __align__(16) char shared[]; const int* words = (const int*)shared;\n"
        f"  {copy.format(at=0)} {copy.format(at=16)} {tell.format(i=0)}\n"
        f'  asm("cp.async.wait_group %0;" ::"n"(1)); {tell.format(i=2)}\n'
        f'  asm("cp.async.wait_all;"); {tell.format(i=4)}\n'
        "}\n",
    )
    given, to = torch.arange(8, dtype=torch.int32) + 7, torch.zeros(6, dtype=torch.int32)
    kernel(1, 1, (given.data_ptr(), to.data_ptr()), 32)
    assert to.tolist() == [-1, -1, 7, -1, 7, 11]
