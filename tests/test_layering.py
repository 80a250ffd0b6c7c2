"""Who may import what, read from the syntax trees: imports inside functions count, those for type checkers only do too."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels", "dpiframe_core", "deployments")

# The only files of the three packages that may import each of these; the keys are top-level module names.
CUPY = {
    "kernels/runtime/source.py",
    "kernels/runtime/launch.py",
    "kernels/runtime/replay.py",
    "dpiframe_core/engine/cuda_bucket.py",
}
_SERVING = ("app", "replica", "engine_replica", "ingress_replica", "launcher", "cluster", "ray_metrics", "front")
RAY = {f"deployments/{name}.py" for name in (*_SERVING, "ray_scoring")}
FASTAPI = {  # replicas name it as a type only
    f"deployments/{name}.py" for name in ("ingress", "replica", "replica_parts", "ingress_replica")
}
GRPC = {"deployments/protocol/grpc_service.py"}
TYPER = {f"deployments/{name}.py" for name in ("cli", "terminal", "score_command", "import_cli")}
ALLOWED = {"cupy": CUPY, "ray": RAY, "fastapi": FASTAPI, "grpc": GRPC, "typer": TYPER}

# What decides runs anywhere and is tested anywhere.
DECIDES = {
    "dpiframe_core/errors.py",
    "dpiframe_core/features/row_block.py",
    "dpiframe_core/features/schema.py",
    "dpiframe_core/strict.py",
    "dpiframe_core/features/transforms.py",
    "dpiframe_core/graph/architecture.py",
    "dpiframe_core/graph/aten.py",
    "dpiframe_core/graph/aten_rules.py",
    "dpiframe_core/graph/graph.py",
    "dpiframe_core/graph/builder.py",
    "dpiframe_core/graph/interactions.py",
    "dpiframe_core/bundle/graph_file.py",
    "dpiframe_core/compiler/strided.py",
    "dpiframe_core/models/layers.py",
    "dpiframe_core/graph/fusion.py",
    "dpiframe_core/graph/schedule.py",
    "dpiframe_core/engine/buckets.py",
    "dpiframe_core/describe/trace.py",
    "dpiframe_core/features/encoder.py",
    "dpiframe_core/bundle/encoding_files.py",
    "dpiframe_core/features/preencoded.py",
    "deployments/batching/batcher.py",
    "deployments/batching/dispatcher.py",
    "deployments/fanin/request_memory.py",
    "deployments/fanin/rings.py",
    "deployments/fanin/handshake.py",
    "deployments/fanin/acceptor.py",
    "deployments/fanin/engine_end.py",
    "deployments/fanin/connection.py",
    "deployments/fanin/scorer.py",
    "deployments/fanin/remote_engine.py",
    "deployments/batching/row_queue.py",
    "deployments/batching/run_times.py",
    "deployments/serve/autoscaling.py",
    "deployments/serve/load_meter.py",
    "deployments/serve/serve_policy.py",
    "deployments/config.py",
    "deployments/serve/host.py",
    "deployments/scoring/bodies.py",
    "deployments/scoring/request_form.py",
    "deployments/metrics.py",
    "deployments/serve/http_app.py",
    "deployments/scoring/scoring.py",
    "deployments/protocol/request.py",
    "deployments/protocol/input.py",
    "deployments/protocol/rest.py",
    "deployments/protocol/grpc_service.py",
    "deployments/client/client.py",
    "deployments/client/call.py",
    *(f"dpiframe_core/models/{path.name}" for path in (ROOT / "dpiframe_core" / "models").glob("*.py")),
}


def sources() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports(file: str, source: str | None = None) -> Iterator[str]:
    """Full names of the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(source or (ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield str(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "__import__",
            "import_module",
            "importlib.import_module",
        ):
            pytest.fail(f"{file}:{node.lineno}: an import that this test cannot read")


@pytest.mark.parametrize("file", sources())
def test_imports_go_from_deployments_to_the_core_to_the_kernels_only(file: str) -> None:
    above = PACKAGES[PACKAGES.index(file.split("/")[0]) + 1 :]
    assert [name for name in imports(file) if name.split(".")[0] in above] == []


@pytest.mark.parametrize("library", sorted(ALLOWED))
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    users = {file for file in sources() if library in {name.split(".")[0] for name in imports(file)}}
    assert users <= ALLOWED[library]
    assert users, f"the rule for {library} guards nothing"


@pytest.mark.parametrize("file", sorted(DECIDES))
def test_what_decides_imports_neither_torch_nor_cupy_nor_ray(file: str) -> None:
    assert {name.split(".")[0] for name in imports(file)} & {"torch", "cupy", "ray", "triton"} == set()


def test_what_decides_does_not_get_torch_through_another_module() -> None:
    """The rule above over all that these files import in turn, but for imports made inside functions."""
    reached: dict[str, str] = {}
    for start in sorted(DECIDES):
        todo, seen = [start], set()
        while todo:
            file = todo.pop()
            if file in seen:
                continue
            seen.add(file)
            for name in top_level_imports(file):
                if name.split(".")[0] in ("torch", "cupy"):
                    reached[start] = f"{file} imports {name}"
                todo += [f for f in (name.replace(".", "/") + ".py", name.replace(".", "/") + "/__init__.py") if f in sources()]
    assert reached == {}


def top_level_imports(file: str) -> Iterator[str]:
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(file, ast.unparse(node))


def test_kernels_is_the_package_of_this_repository() -> None:
    import kernels

    assert kernels.__file__ is not None
    assert Path(kernels.__file__).resolve().is_relative_to(ROOT)


def test_the_reader_of_imports_sees_those_inside_functions() -> None:
    source = "def f():\n    if True:\n        from torch.nn import Linear\n    import cupy as cp\n"
    assert set(imports("x.py", source)) == {"torch.nn", "cupy"}


@pytest.mark.parametrize("file", sources())
def test_nothing_evaluates_text_or_unpickles(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {ast.unparse(node.func) for node in calls}
    assert called & {"eval", "exec", "pickle.load", "pickle.loads"} == set()
    # Checkpoints of other libraries have one reader, which takes weights and nothing else; and one unpickler of inert records.
    loads = [ast.unparse(node) for node in calls if ast.unparse(node.func) == "torch.load"]
    assert file == "dpiframe_core/importers/state_dict.py" or not loads
    assert all("weights_only=True" in load for load in loads)
    unpicklers = [
        n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and "pickle.Unpickler" in map(ast.unparse, n.bases)
    ]
    assert file == "dpiframe_core/importers/fuxictr/pickled_processor.py" or not unpicklers
