"""The rooms of the house, and who may import what: read from the syntax trees, so imports inside functions count too.

`ROOMS` is the one table. A room is a folder; what it may import of other rooms stands beside it, with the reason. An import
that is not in the table fails, and so does an entry that no import needs.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels", "dpiframe_core", "deployments")
FLOORS = (*PACKAGES, "benchmarks")
MOST_FILES = 16
SOURCES = {".py", ".cu", ".cuh", ".c", ".h"}

# Files beside the rooms that every room of their floor and the floors above may read. They read only each other.
COMMON = {
    "dpiframe_core/errors", "dpiframe_core/strict", "dpiframe_core/strict_yaml",
    "deployments/config", "deployments/config_clients", "deployments/config_faults", "deployments/config_models",
    "deployments/config_load", "deployments/config_tables", "deployments/config_observed",
    "deployments/metrics",
    "deployments/private_ray", "deployments/processes", "deployments/signals", "deployments/worker_start",
    "benchmarks/host_cores", "benchmarks/timing",
}  # fmt: skip

ROOMS: dict[str, dict[str, str]] = {
    "kernels/runtime": {},
    "kernels/columns": {},
    "kernels/lookup": {"kernels/runtime": "its kernel is compiled and launched"},
    "kernels/reference": {"kernels/lookup": "the plain lookup follows the same plan"},
    "kernels/dense": {
        "kernels/runtime": "its kernels are compiled and launched",
        "kernels/reference": "a product in float32 is the plain one, through torch",
    },
    "kernels/interaction": {
        "kernels/runtime": "its kernels are compiled and launched",
        "kernels/reference": "a cross network is folded as the plain version does",
        "kernels/dense": "activations and products inside CIN",
    },
    "kernels/attention": {
        "kernels/runtime": "its kernels are compiled and launched",
        "kernels/reference": "it forms its inputs as the plain version does",
        "kernels/dense": "activations and products",
        "kernels/cpu": "rows are shared out among torch's threads",
    },
    "kernels/recurrent": {
        "kernels/runtime": "its kernels are compiled and launched",
        "kernels/cpu": "a layer's inputs are multiplied as dense layers are",
    },
    "kernels/waves": {
        "kernels/runtime": "its kernels are compiled and launched; matrices come by tensor maps",
        "kernels/dense": "dtypes and padding of packed weights are those of single products",
        "kernels/interaction": "a chain makes a tower's dots",
    },
    "kernels/cpu": {
        "kernels/runtime": "its C code is built there",
        "kernels/lookup": "the same plan and id records as on a GPU",
        "kernels/reference": "what C does not do is done plainly",
    },
    "kernels/copies": {"kernels/runtime": "its C code is built there"},
    "kernels/norms": {
        "kernels/runtime": "its C code is built there",
        "kernels/cpu": "rows are shared out among torch's threads",
    },
    "dpiframe_core/features": {
        "kernels/lookup": "a row block packs ids as the lookup's records say",
        "kernels/runtime": "columns are read and packed in C where it is built",
    },
    "dpiframe_core/graph": {"dpiframe_core/features": "a graph reads the features of a schema"},
    "dpiframe_core/fusion": {"dpiframe_core/graph": "a graph becomes one of fewer operators"},
    "dpiframe_core/bundle": {
        "dpiframe_core/features": "a bundle holds a schema, vocabularies and golden rows",
        "dpiframe_core/graph": "it holds an architecture, or a graph as data",
    },
    "dpiframe_core/models": {
        "dpiframe_core/features": "a model is made for a schema",
        "dpiframe_core/graph": "a model is a graph of hyper-parameters",
        "dpiframe_core/bundle": "the graph of a bundle's model, held against its parameters",
    },
    "dpiframe_core/far_rows": {
        "dpiframe_core/features": "tables are those of a schema, their ids those of row blocks",
        "kernels/lookup": "an id of so many bytes has room for slots",
        "kernels/copies": "rows of files are copied into slots",
        "kernels/runtime": "or into memory of the host that a GPU reads",
    },
    "dpiframe_core/embedding": {
        "kernels/runtime": "rows lie in memory that a GPU reads",
        "dpiframe_core/far_rows": "or in files, and are read ahead",
        "dpiframe_core/features": "tables are those of a schema",
        "dpiframe_core/graph": "the graph's lookup says which tables it reads",
        "kernels/lookup": "a layout is the kernel's plan and its descriptors",
    },
    "dpiframe_core/replan": {
        "dpiframe_core/features": "samples of reads are row blocks",
        "dpiframe_core/embedding": "whose rows move",
        "dpiframe_core/far_rows": "those of files, too",
    },
    "dpiframe_core/operators/generic": {
        "dpiframe_core/graph": "calls are those of a graph's nodes",
        "kernels/lookup": "lists that a lookup sums",
        "kernels/norms": "softmax, layer norm and choices on a CPU",
        "kernels/runtime": "where C is built",
    },
    "dpiframe_core/operators": {
        "dpiframe_core/operators/generic": "generic operators beside the rest",
        "dpiframe_core/features": "a batch is a row block",
        "dpiframe_core/graph": "operators are a graph's, in the order of a schedule",
        "dpiframe_core/fusion": "and some are those that fusion makes",
        "dpiframe_core/embedding": "lookups read the store",
        "dpiframe_core/far_rows": "rows of files are there when a lookup is timed",
        "kernels/runtime": "launches that overlap",
        "kernels/lookup": "the lookup on a GPU",
        "kernels/reference": "the plain operators of an ablation",
        "kernels/dense": "products, activations, heads",
        "kernels/interaction": "FM, cross, dot, CIN",
        "kernels/attention": "attention over a sequence, and over fields",
        "kernels/recurrent": "GRU and LSTM",
        "kernels/waves": "waves and chains",
        "kernels/cpu": "the lookup and the first layers on a CPU",
    },
    "dpiframe_core/machine": {},
    "dpiframe_core/engine": {
        "dpiframe_core/machine": "devices have names, choices hold for one machine",
        "dpiframe_core/features": "rows come as blocks, requests through the encoder",
        "dpiframe_core/bundle": "an engine serves a bundle",
        "dpiframe_core/models": "whose model is a graph",
        "dpiframe_core/fusion": "that is fused",
        "dpiframe_core/graph": "scheduled, and grouped into waves",
        "dpiframe_core/embedding": "whose tables lie in the store",
        "dpiframe_core/far_rows": "or in files, and are read ahead of its batches",
        "dpiframe_core/replan": "and move while it serves",
        "dpiframe_core/operators": "and whose operators are bound to a device",
        "kernels/runtime": "graphs are replayed, code is kept on disk",
        "kernels/lookup": "a lane stages what the lookup reads",
        "kernels/copies": "or has it read elsewhere",
        "kernels/dense": "strict float32 is a setting of products",
    },
    "dpiframe_core/compiler/operations": {
        "dpiframe_core/graph": "an operation becomes nodes of a graph",
        "dpiframe_core/operators": "batch norm is folded as there",
    },
    "dpiframe_core/compiler": {
        "dpiframe_core/features": "a module's inputs are a schema's features",
        "dpiframe_core/compiler/operations": "its calls become operations",
        "dpiframe_core/graph": "a module becomes a graph",
        "dpiframe_core/fusion": "is fused as for an engine",
        "dpiframe_core/bundle": "and is written as a bundle",
        "dpiframe_core/embedding": "its tables are stored",
        "dpiframe_core/operators": "it is run on the CPU, against the module",
        "dpiframe_core/engine": "by the CPU's lane",
        "dpiframe_core/describe": "what became of it is told in text",
        "kernels/recurrent": "the name of DIEN's GRU among torch's operators",
    },
    "dpiframe_core/evaluation": {"dpiframe_core/features": "scores are float32[n, tasks]"},
    "dpiframe_core/files": {"dpiframe_core/features": "rows of a file are encoded as requests are"},
    "dpiframe_core/importers": {
        "dpiframe_core/features": "a source's features become a schema",
        "dpiframe_core/graph": "its hyper-parameters an architecture",
        "dpiframe_core/bundle": "both a bundle",
        "dpiframe_core/models": "the bundle's graph is run",
        "dpiframe_core/evaluation": "and its scores held against the source's",
        "dpiframe_core/files": "on rows of the user's file",
        "dpiframe_core/operators": "batch normalisation is folded into the layer ahead of it",
        "dpiframe_core/compiler": "a module of the user's own is compiled, a bundle's graph scored on few rows",
    },
    "dpiframe_core/importers/deepctr": {
        "dpiframe_core/importers": "specs, layers, sources and state dicts of all libraries",
        "dpiframe_core/graph": "its hyper-parameters are an architecture",
    },
    "dpiframe_core/importers/networks": {
        "dpiframe_core/importers": "a setting that lacks is said as everywhere",
        "dpiframe_core/features": "values of a schema's features",
        "kernels/recurrent": "DIEN's GRU",
    },
    "dpiframe_core/importers/fuxictr/zoo": {
        "dpiframe_core/importers/networks": "what a model is a function of, and layers that several share",
    },
    "dpiframe_core/importers/recbole": {
        "dpiframe_core/importers": "specs, sources and state dicts of all libraries",
        "dpiframe_core/importers/networks": "what a model is a function of, and layers that several share",
        "dpiframe_core/features": "a spec becomes a schema",
        "dpiframe_core/graph": "a graph is an architecture",
        "dpiframe_core/compiler": "its models are compiled",
    },
    "dpiframe_core/importers/fuxictr": {
        "dpiframe_core/importers": "layers, sources and state dicts of all libraries",
        "dpiframe_core/features": "a feature map becomes a schema",
        "dpiframe_core/graph": "a configuration becomes an architecture",
        "dpiframe_core/importers/fuxictr/zoo": "its models by name",
        "dpiframe_core/importers/networks": "which are functions of a checkpoint's parameters",
        "dpiframe_core/compiler": "those, and a class of the user's own, are compiled",
    },
    "dpiframe_core/describe": {
        "dpiframe_core/operators/generic": "calls of a CPU's tiles are timed",
        "dpiframe_core/features": "a request to profile, the schema to show",
        "dpiframe_core/graph": "the plan to draw",
        "dpiframe_core/fusion": "as it is fused",
        "dpiframe_core/bundle": "of a bundle",
        "dpiframe_core/models": "of its model",
        "dpiframe_core/engine": "a profile runs an engine",
        "dpiframe_core/operators": "operator by operator",
        "dpiframe_core/machine": "on a machine, which the trace names",
    },
    "deployments/batching": {"dpiframe_core/features": "what is batched is a row block"},
    "deployments/scoring": {
        "deployments/batching": "a served model's rows go to a batcher",
        "dpiframe_core/features": "a request form is built from a schema",
        "dpiframe_core/graph": "a served model tells its architecture",
        "dpiframe_core/engine": "and its batch sizes",
        "kernels/runtime": "large bodies are read without garbage collection",
    },
    "deployments/access": {},
    "deployments/http_api": {
        "deployments/access": "a route asks the gate first",
        "deployments/scoring": "a route hands requests to the served model",
        "dpiframe_core/features": "an answer holds scores of a row block",
        "kernels/runtime": "a list of requests is cut in C where it is built",
    },
    "deployments/protocol": {
        "deployments/access": "and so do its routes and calls",
        "deployments/http_api": "bodies are read, and errors answered, as everywhere",
        "deployments/scoring": "requests go to the served model",
        "dpiframe_core/features": "tensors are columns of features",
        "kernels/runtime": "large bodies are read without garbage collection",
    },
    "deployments/fanin": {
        "deployments/batching": "the engine's end dispatches batches from every ingress",
        "dpiframe_core/features": "rows cross as a row block",
        "dpiframe_core/bundle": "both ends name the bundle by its fingerprint",
        "dpiframe_core/engine": "counts of rows by bucket",
    },
    "deployments/host_sockets": {"deployments/fanin": "whoever is at the other end is looked at as engines and ingresses do"},
    "deployments/direct/native": {},
    "deployments/direct": {
        "deployments/host_sockets": "its processes share what clients connect to",
        "deployments/batching": "a request is the reply that its scorer tells",
        "deployments/fanin": "processes of a node meet as engines and ingresses do",
        "deployments/http_api": "the score route's steps, bodies and answers",
        "deployments/protocol": "the inference route's",
        "deployments/scoring": "over served models",
        "dpiframe_core/features": "a request keeps what encodes it, for a shadow",
        "kernels/runtime": "its listener is built there",
    },
    "deployments/telemetry": {
        "deployments/scoring": "a request's spans are made of its job",
        "dpiframe_core/far_rows": "where rows of files were found",
        "dpiframe_core/replan": "where reads of tables were served",
    },
    "deployments/score_log": {
        "deployments/scoring": "what is written is a scored job",
        "dpiframe_core/features": "its raw values, by the schema",
        "dpiframe_core/files": "typed as the files that `dpiframe score` reads",
    },
    "deployments/status": {},
    "deployments/lifecycle": {
        "deployments/access": "who changes models, and the folder that their bundles must not leave",
        "deployments/http_api": "bodies are read as everywhere",
        "deployments/scoring": "a change is one of who scores which requests",
        "dpiframe_core/bundle": "a release is a bundle, by its manifest",
    },
    "deployments/tls": {"kernels/runtime": "as many threads as cores may be used"},
    "deployments/preflight": {
        "deployments/access": "the file of tokens can be read, and bundles are in their folder",
        "deployments/lifecycle": "bundles have manifests, and names that differ",
        "deployments/tls": "a certificate has its key",
        "deployments/host_sockets": "the group of a socket's file is one of this host",
        "dpiframe_core/bundle": "what a manifest is called",
        "dpiframe_core/embedding": "what a placement is called",
    },
    "deployments/serve": {
        "deployments/tls": "the launcher ends TLS before the service",
        "deployments/preflight": "and looks at all files before it starts anything",
        "deployments/access": "a replica's gate, and the folder that its bundles must not leave",
        "deployments/telemetry": "metrics of all processes, the form of the log",
        "deployments/lifecycle": "a replica serves what all agree on",
        "deployments/status": "the app mounts the status page",
        "deployments/score_log": "a replica writes a sample of its requests",
        "deployments/batching": "a replica owns a batcher",
        "deployments/direct": "a replica may have a direct port",
        "deployments/host_sockets": "at a port, a file, or both",
        "kernels/runtime": "its garbage is collected as a service needs it, its cores are counted",
        "deployments/fanin": "or the two ends of the fan-in",
        "deployments/http_api": "the app mounts the score route",
        "deployments/protocol": "and the protocol's",
        "deployments/scoring": "over served models",
        "deployments/remote_rows": "rows of files may be others'",
        "dpiframe_core/bundle": "an ingress reads what encoding takes",
        "dpiframe_core/embedding": "where their tables lie",
        "dpiframe_core/engine": "a replica hosts engines",
        "dpiframe_core/features": "and an encoder",
    },
    "deployments/remote_rows": {
        "deployments/access": "a shard's bundle stays in the folder that it must not leave",
        "deployments/telemetry": "a shard logs as replicas do",
        "dpiframe_core/bundle": "it has a bundle's tables",
        "dpiframe_core/far_rows": "a source of rows that are read ahead, and who answers it",
    },
    "deployments/offline": {
        "dpiframe_core/bundle": "a job scores with a bundle",
        "dpiframe_core/engine": "on an engine of its own",
        "dpiframe_core/machine": "whose layers take one thread",
        "kernels/runtime": "of as many as cores may be used",
        "dpiframe_core/evaluation": "and reports how well",
        "dpiframe_core/features": "rows are blocks",
        "dpiframe_core/files": "of a file",
    },
    "deployments/demo": {
        "dpiframe_core/bundle": "its model is exported",
        "dpiframe_core/machine": "trained on one thread",
        "dpiframe_core/evaluation": "held against its data",
        "dpiframe_core/features": "encoded as requests are",
        "dpiframe_core/files": "from a click log",
        "dpiframe_core/graph": "a DeepFM",
    },
    "deployments/cli": {
        "deployments/access": "dpiframe token",
        "deployments/cli/tables": "dpiframe compress, plan",
        "deployments/client": "dpiframe models sends a token as clients do",
        "deployments/demo": "dpiframe demo",
        "deployments/offline": "dpiframe score",
        "deployments/preflight": "dpiframe check-config",
        "deployments/serve": "dpiframe serve",
        "dpiframe_core/bundle": "dpiframe inspect, tune",
        "dpiframe_core/describe": "dpiframe inspect, profile",
        "dpiframe_core/engine": "dpiframe tune",
        "dpiframe_core/importers": "dpiframe import",
        "dpiframe_core/importers/deepctr": "dpiframe import deepctr-torch",
        "dpiframe_core/importers/fuxictr": "dpiframe import fuxictr",
        "dpiframe_core/importers/recbole": "dpiframe import recbole",
    },
    "deployments/cli/tables": {
        "deployments/offline": "scores of a compressed model against labels",
        "dpiframe_core/bundle": "one is compressed or planned for",
        "dpiframe_core/embedding": "the tables",
        "dpiframe_core/engine": "scores before and after",
        "dpiframe_core/features": "which features read a table",
        "dpiframe_core/files": "rows, to count what is read",
        "dpiframe_core/fusion": "the lookup whose time is measured",
        "dpiframe_core/machine": "what it was measured on",
        "dpiframe_core/models": "the graph that the lookup is of",
        "dpiframe_core/operators": "the lookup itself",
    },
    "deployments/client": {},
    # Benchmarks may read all of the product; the table holds their own rooms alone.
    "benchmarks/workloads": {},
    "benchmarks/systems": {"benchmarks/workloads": "a system scores a workload's batches with its weights"},
    "benchmarks/records": {"benchmarks/systems": "which systems are compiled peers"},
    "benchmarks/device": {
        "benchmarks/systems": "systems and cells that are measured",
        "benchmarks/workloads": "on models and batches",
        "benchmarks/records": "a suite writes records",
    },
    "benchmarks/gpus": {
        "benchmarks/systems": "a batch on the device, and the plain gather",
        "benchmarks/workloads": "on batches",
        "benchmarks/records": "a suite writes records",
    },
    "benchmarks/apart": {
        "benchmarks/systems": "systems and cells that are measured",
        "benchmarks/workloads": "on models and batches",
        "benchmarks/records": "a suite writes records",
    },
    "benchmarks/serving/stages": {
        "benchmarks/serving": "the load, the services and their CPU time are those of the other suites",
        "benchmarks/records": "a suite writes records",
    },
    "benchmarks/serving/stalls": {
        "benchmarks/serving": "the load and the services are those of the other suites",
        "benchmarks/records": "a suite writes records",
    },
    "benchmarks/serving": {
        "benchmarks/serving/peers": "scores are held against the eager peer's",
        "benchmarks/systems": "cells that are measured",
        "benchmarks/workloads": "the model that is scored offline",
        "benchmarks/records": "a suite writes records",
    },
    "benchmarks/serving/peers": {},
    "benchmarks/report": {
        "benchmarks/records": "a report reads them",
        "benchmarks/serving": "names of payloads and steps",
        "benchmarks/serving/stages": "names of stages",
        "benchmarks/systems": "names of systems",
    },
}

# Names that the outside imports: a docstring and a name that a room owns.
PUBLIC = {
    "dpiframe_core/__init__": {"dpiframe_core/compiler", "dpiframe_core/features"},  # dpiframe_core.compile
    "dpiframe_core/engine/__init__": set(),  # dpiframe_core.engine.Engine
    "deployments/client/__init__": set(),  # deployments.client.Client
    "deployments/app": {"deployments/serve"},
    "deployments/front": {"deployments/http_api"},
    "deployments/infer_grpc": {"deployments/protocol"},
}

# The only files of the three packages that may import each of these; the keys are top-level module names.
CUPY = {
    "kernels/runtime/source.py", "kernels/runtime/launch.py", "kernels/runtime/replay.py", "kernels/runtime/host_memory.py",
    "kernels/runtime/device_memory.py",     "dpiframe_core/engine/cuda_bucket.py",
}  # fmt: skip
_SERVING = ("application", "replica", "engine_replica", "ingress_replica", "launcher", "cluster", "ray_metrics")
RAY = {
    "deployments/app.py", "deployments/http_api/serve_bypass.py", "deployments/offline/ray_scoring.py",
    "deployments/private_ray.py",
    "deployments/lifecycle/actor.py", "deployments/remote_rows/row_shard.py",
    *(f"deployments/serve/{name}.py" for name in _SERVING),
}  # fmt: skip
FASTAPI = {  # replicas name it as a type only
    *(f"deployments/serve/{name}.py" for name in ("http_app", "replica", "replica_app", "ingress_replica")),
    "deployments/lifecycle/routes.py",
}
GRPC = {"deployments/protocol/grpc_service.py"}
_COMMANDS = (
    "check_command", "score_command", "import_command", "token_command", "models_command", "capacity_command", "table_commands",
)  # fmt: skip
TYPER = {f"deployments/cli/{name}.py" for name in ("main", "terminal", *_COMMANDS)}
ALLOWED = {"cupy": CUPY, "ray": RAY, "fastapi": FASTAPI, "grpc": GRPC, "typer": TYPER}

# What decides runs anywhere and is tested anywhere: neither torch nor CuPy nor Ray, not through another module either.
DECIDES = {
    "dpiframe_core/errors", "dpiframe_core/strict", "dpiframe_core/strict_yaml", "dpiframe_core/features",
    "dpiframe_core/graph", "dpiframe_core/fusion", "dpiframe_core/files", "dpiframe_core/evaluation", "dpiframe_core/models",
    "dpiframe_core/bundle/manifest", "dpiframe_core/embedding/row_counts", "dpiframe_core/embedding/frequency",
    "dpiframe_core/embedding/placement", "dpiframe_core/embedding/place_rows", "dpiframe_core/embedding/placement_file",
    "deployments/cli/tables/plan_command", "deployments/cli/capacity",
    "dpiframe_core/bundle/graph_file", "dpiframe_core/bundle/encoding_files", "dpiframe_core/engine/buckets",
    "dpiframe_core/engine/calibration", "dpiframe_core/engine/options", "dpiframe_core/compiler/operations/strided",
    "dpiframe_core/describe/trace", "deployments/config", "deployments/metrics",
    "deployments/access", "deployments/http_api/gated", "deployments/batching", "deployments/scoring",
    "deployments/protocol", "deployments/fanin", "deployments/client", "deployments/direct", "deployments/host_sockets",
    "deployments/http_api/score_route",
    "deployments/http_api/answers", "deployments/http_api/request_body", "deployments/http_api/arrow_body",
    "deployments/serve/http_app", "deployments/serve/openapi", "deployments/serve/autoscaling",
    "deployments/serve/serve_policy", "deployments/serve/host", "deployments/telemetry",
    *(f"deployments/lifecycle/{name}" for name in ("coordinator", "desired", "follower", "routes", "serving")),
}  # fmt: skip
HEAVY = {"torch", "cupy", "ray", "triton"}
MODEL_GRAPH = "dpiframe_core/models/model_graph.py"  # reads a bundle, whose tables are torch's


def sources(floors: tuple[str, ...] = PACKAGES) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for floor in floors for path in (ROOT / floor).rglob("*.py"))


@cache
def nodes_of(file: str) -> list[ast.AST]:
    return list(ast.walk(_tree(file)))


@cache
def names_of(file: str, everywhere: bool = True) -> frozenset[str]:
    """What a file imports: also inside functions, or at its top level alone."""
    return frozenset(imports(file, nodes_of(file) if everywhere else list(_tree(file).body)))


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


LOADERS = ("__import__", "import_module")


def imports(where: str, nodes: list[ast.AST]) -> Iterator[str]:
    """Full names of what the nodes import; of `from a import b`, `a.b` if that is a module, else `a`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{where}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if file_of(name) else str(node.module)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in LOADERS:
            pytest.fail(f"{where}:{node.lineno}: an import that this test cannot read")


@cache
def file_of(module: str) -> str | None:
    """The file of a module of ours, relative to the root; None if it is not ours."""
    path = module.replace(".", "/")
    return next((file for file in (f"{path}.py", f"{path}/__init__.py") if (ROOT / file).is_file()), None)


@cache
def own_imports(file: str) -> frozenset[str]:
    """The files of ours that a file imports."""
    return frozenset({found for name in names_of(file) if (found := file_of(name)) and found != file})


def room_of(file: str) -> str:
    """The folder of a file; of a file beside the rooms, or of a public name, its own path."""
    stem = file.removesuffix(".py")
    folder = stem.rsplit("/", 1)[0]
    return stem if folder in FLOORS or stem in PUBLIC else folder


def test_imports_go_down_the_floors_only() -> None:
    floor = {file: FLOORS.index(file.split("/")[0]) for file in sources(FLOORS)}
    assert [f"{file}: {used}" for file in floor for used in own_imports(file) if floor[used] > floor[file]] == []


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_what_the_table_says_and_all_of_it(room: str) -> None:
    used = {room_of(u) for file in sources(FLOORS) if room_of(file) == room for u in own_imports(file)} - COMMON - {room}
    if room.startswith("benchmarks/"):
        used = {name for name in used if name.startswith("benchmarks/")}
    assert used - {"kernels/__init__"} == ROOMS[room].keys()


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_imports_the_room_that_owns_it(name: str) -> None:
    used = {room_of(file) for file in own_imports(f"{name}.py")} - COMMON
    assert used == (PUBLIC[name] or {name.removesuffix("/__init__")})


def test_what_every_room_may_read_reads_no_room() -> None:
    ours = [name for name in COMMON if name.split("/")[0] in PACKAGES]
    assert {name: used for name in ours if (used := {room_of(file) for file in own_imports(f"{name}.py")} - COMMON)} == {}


def test_every_file_is_in_a_room_of_the_table() -> None:
    beside = {f"{floor}/__init__" for floor in ("kernels", "deployments", "benchmarks")} | {"benchmarks/__main__"}
    assert {room_of(file) for file in sources(FLOORS)} - ROOMS.keys() - COMMON - PUBLIC.keys() == beside


def test_there_are_no_circles_between_rooms() -> None:
    assert _circle({room: set(used) for room, used in ROOMS.items()}) is None


def test_there_are_no_circles_inside_a_room() -> None:
    inside = {f: {used for used in own_imports(f) if room_of(used) == room_of(f)} for f in sources(FLOORS)}
    assert _circle(inside) is None


def _circle(uses: dict[str, set[str]]) -> list[str] | None:
    try:
        TopologicalSorter(uses).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def test_a_circle_is_found() -> None:
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) is not None


@pytest.mark.parametrize("floor", [*FLOORS, "tests"])
def test_no_folder_has_more_files_than_a_newcomer_can_take_in(floor: str) -> None:
    counts: dict[str, int] = {}
    for path in (ROOT / floor).rglob("*"):
        if path.suffix in SOURCES and path.name != "__init__.py":
            folder = str(path.parent.relative_to(ROOT))
            counts[folder] = counts.get(folder, 0) + 1
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_a_room_opens_with_a_docstring_and_hands_on_public_names_alone() -> None:
    """A name handed on here would pull torch into processes that must stay free of it."""
    for file in (file for file in sources(FLOORS) if file.endswith("/__init__.py")):
        assert ast.get_docstring(_tree(file)), file
        assert len(_tree(file).body) == 1 or file.removesuffix(".py") in PUBLIC, file


def test_tests_mirror_the_rooms() -> None:
    rooms = {room for room in ROOMS if (ROOT / room).is_dir()}
    folders = {str(path.parent.relative_to(ROOT / "tests")) for path in (ROOT / "tests").rglob("test_*.py")}
    packages = {folder for folder in folders if folder.split("/")[0] in PACKAGES}
    assert packages <= rooms | set(PACKAGES)


@pytest.mark.parametrize("library", sorted(ALLOWED))
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    users = {file for file in sources() if library in {name.split(".")[0] for name in names_of(file)}}
    assert users <= ALLOWED[library]
    assert users, f"the rule for {library} guards nothing"


def deciding() -> list[str]:
    return [
        file
        for file in sources()
        if {file.removesuffix(".py"), file.rsplit("/", 1)[0]} & DECIDES and file not in {MODEL_GRAPH, *RAY}
    ]


def test_what_decides_gets_neither_torch_nor_cupy_nor_ray_not_even_through_another_module() -> None:
    """Imports inside functions count in the file itself, and not in those that it imports in turn."""
    assert {file: got for file in deciding() if (got := {name.split(".")[0] for name in names_of(file)} & HEAVY)} == {}
    todo, seen = [(file, file) for file in deciding()], set()
    while todo:
        at, way = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        found = names_of(at, everywhere=False)
        assert {name.split(".")[0] for name in found} & HEAVY == set(), way
        todo += [(used, f"{way} > {used}") for name in found if (used := file_of(name))]


def test_every_entry_of_what_decides_names_something() -> None:
    assert {entry for entry in DECIDES if not (ROOT / entry).is_dir() and not (ROOT / f"{entry}.py").is_file()} == set()


def test_kernels_is_the_package_of_this_repository() -> None:
    import kernels

    assert kernels.__file__ is not None
    assert Path(kernels.__file__).resolve().is_relative_to(ROOT)


def test_the_reader_of_imports_sees_those_inside_functions_and_modules_by_name() -> None:
    inside = "def f():\n    if True:\n        from torch.nn import Linear\n    import cupy as cp\n"
    source = f"{inside}from kernels.runtime import launch\n"
    assert set(imports("x.py", list(ast.walk(ast.parse(source))))) == {"torch.nn", "cupy", "kernels.runtime.launch"}


def test_nothing_evaluates_text_or_unpickles() -> None:
    """Checkpoints of other libraries have one reader, which takes weights alone; and one unpickler of inert records."""
    suspects = [file for file in sources() if re.search("eval|exec|pickle|torch.load", (ROOT / file).read_text())]
    calls = {(f, ast.unparse(n.func), ast.unparse(n)) for f in suspects for n in nodes_of(f) if isinstance(n, ast.Call)}
    assert {call for call in calls if call[1] in {"eval", "exec", "pickle.load", "pickle.loads"}} == set()
    loads = {(file, "weights_only=True" in call) for file, function, call in calls if function == "torch.load"}
    assert loads == {("dpiframe_core/importers/state_dict.py", True)}
    bases = {(f, ast.unparse(base)) for f in suspects for n in nodes_of(f) if isinstance(n, ast.ClassDef) for base in n.bases}
    unpicklers = {file for file, base in bases if base == "pickle.Unpickler"}
    assert unpicklers == {"dpiframe_core/importers/fuxictr/pickled_processor.py"}
