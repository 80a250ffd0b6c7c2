"""Every .cu file compiles for the GPUs that we name, on machines without one: NVRTC needs no driver."""

import re
from collections.abc import Mapping, Sequence

import pytest

from kernels.runtime.source import ARCHITECTURE, FOLDER, compile_options, source
from tests.kernels.variants import VARIANTS

pytestmark = pytest.mark.bulk

program = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


def covering(variants: Sequence[Mapping[str, str]]) -> set[int]:
    """Few variants that have every value that some variant has of a constant, and the one without constants."""
    left, taken = {pair for variant in variants for pair in variant.items()}, set()
    while left:
        best = max(range(len(variants)), key=lambda i: len(left & variants[i].items()))
        left -= variants[best].items()
        taken.add(best)
    return taken | {i for i, variant in enumerate(variants) if not variant}


def later(variants: Sequence[Mapping[str, str]]) -> set[int]:
    """Those that need more than sm_80: fp8 sm_89, clusters sm_90."""
    return {i for i, variant in enumerate(variants) if "fp8" in variant.values() or variant.get("CLUSTERED") == "1"}


# All variants for one architecture; for the others every value of every constant: that only decides two functions of
# common.cuh, which have an instruction of sm_90 on, in all kernels alike. A run takes every value of every constant once: for
# sm_80 where that has it. Of the others, which have all its instructions, it takes one variant of a file.
CASES = [
    pytest.param(file, i, architecture, id=f"{file}-{i}-{architecture}", marks=() if i in of_run else pytest.mark.whole)
    for file, variants in VARIANTS.items()
    for architecture in ([ARCHITECTURE[file]] if file in ARCHITECTURE else ARCHITECTURES)
    for of_run in [
        covering(variants)
        if architecture in ("sm_80", "sm_90a")
        else {max(covering(variants)), *(later(variants) & covering(variants))}
    ]
    for i in (sorted(covering(variants)) if architecture in ("sm_80", "sm_100") else range(len(variants)))
    if architecture != "sm_80" or i not in later(variants)
]


def compiled(code: str, constants: dict[str, str], architecture: str, fast: bool = False) -> bytes:
    """fast: without most of the optimizer, in a third of the time."""
    options = compile_options(constants)
    include = [option.removeprefix("-I") for option in options if option.startswith("-I")]
    macros = [tuple(option.removeprefix("-D").split("=", 1)) for option in options if option.startswith("-D")]
    (standard,) = [option.removeprefix("-std=") for option in options if option.startswith("-std=")]
    level = "max" if fast else None
    settings = program.ProgramOptions(
        std=standard, arch=architecture, include_path=include, define_macro=macros or None, ofast_compile=level
    )
    return bytes(program.Program(code, code_type="c++", options=settings).compile("cubin").code)


@pytest.mark.parametrize(("file", "variant", "architecture"), CASES)
def test_every_kernel_compiles_in_every_variant(
    file: str, variant: int, architecture: str, pytestconfig: pytest.Config
) -> None:
    """Optimized as for use once a file, and with --whole where every value of every constant comes by; else it is quicker."""
    code, of_use = source(file), covering(VARIANTS[file])
    of_use = of_use if pytestconfig.getoption("--whole") else {max(of_use)}
    fast = not (architecture.startswith("sm_90") and variant in of_use)
    cubin = compiled(code, VARIANTS[file][variant], architecture, fast)
    for name in re.findall(r'extern "C" __global__ void (?:__\w+__\([^)]*\) )*(\w+)\(', code):
        assert name.encode() in cubin


def test_the_architecture_matters_in_one_header_alone() -> None:
    """What `CASES` rests on."""
    asking = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.cu*") if "__CUDA_ARCH__" in path.read_text()}
    assert asking == {"runtime/common.cuh"}


def test_a_kernel_that_is_no_cpp_does_not_compile() -> None:
    with pytest.raises(Exception, match="NVRTC_ERROR_COMPILATION"):
        compiled('extern "C" __global__ void f() { nonsense }', {}, "sm_80")


def test_every_cuda_file_has_variants_and_every_kernel_is_asked_for_by_its_own_name() -> None:
    files = {str(path.relative_to(FOLDER))[:-3]: path.read_text() for path in FOLDER.rglob("*.cu")}
    assert files.keys() == VARIANTS.keys()
    names = {name for code in files.values() for name in re.findall(r"__global__ void (?:__\w+__\([^)]*\) )*(\w+)\(", code)}
    asked = "".join(path.read_text() for path in FOLDER.rglob("*.py"))
    assert {name for name in names if f'"{name}"' not in asked} == set()


def test_constants_that_the_launchers_give_are_those_of_the_variants() -> None:
    """A constant that only a launcher or only the table knows would make this file test something else than what runs."""
    given = {
        str(path.relative_to(FOLDER))[:-3]: set(re.findall(r'"([A-Z][A-Z_]*)"(?::|\] =)', path.read_text()))
        for path in FOLDER.rglob("*.py")
    }
    given["waves/wave"] |= given["waves/wave_tiles"] | given["waves/wave_jobs"]
    given["waves/chain"] |= given["waves/wave_jobs"]
    for file in ("attention/attention", "attention/attention_mma"):
        given[file] |= given["attention/attention_columns"]
    given["waves/wave_wgmma"] = given["waves/wave"] - {"WM", "WN", "SPAN", "OUTER"}
    given["waves/crossed_wgmma"] = {"X", "OUTER"} | (given["waves/wave_tiles"] & {"BM", "BN", "STAGES"})
    given["waves/wave"] -= {"BRINGS", "OUTER"}
    for file, variants in VARIANTS.items():
        assert given[file] == {name for constants in variants for name in constants}, file
