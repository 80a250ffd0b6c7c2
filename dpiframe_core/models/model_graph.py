"""The op graph of a bundle's model, held against the bundle's parameters. Nothing executable."""

from dpiframe_core.bundle.bundle import Bundle
from dpiframe_core.errors import BundleError
from dpiframe_core.graph.graph import Graph
from dpiframe_core.models.build import build_graph


def model_graph(bundle: Bundle) -> Graph:
    """The unfused op graph of a bundle's model, by its function or graph.json, its parameters checked against the bundle's.

    Raises:
        BundleError: the architecture does not fit the schema, or a parameter is missing, left over or of a wrong shape.
    """
    m = bundle.manifest
    try:
        graph = bundle.graph or build_graph(m.architecture, m.feature_schema, len(m.tasks))
    except ValueError as error:
        raise BundleError(f"{bundle.path}/model.yaml: architecture {m.architecture.type}: {error}") from error
    found = {name: tuple(t.shape) for name, t in bundle.dense.items()}
    wrong = sorted(n for n in graph.params.keys() | found.keys() if graph.params.get(n) != found.get(n))
    if wrong:
        name = wrong[0]
        raise BundleError(
            f"{bundle.path}/dense.safetensors: {name}: got {found.get(name, 'none')}, expected {graph.params.get(name, 'none')}"
            f"{f' ({len(wrong) - 1} more parameters differ)' if len(wrong) > 1 else ''}"
        )
    return graph
