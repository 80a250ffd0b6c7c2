"""Makes the stored cases from FuxiCTR's own classes.

    python -m tests.dpiframe_core.importers.fuxictr.zoo.make FUXICTR_REPOSITORY [CASE ..]

Needs the wheel `fuxictr` and a checkout of its repository, whose `model_zoo` no wheel has. Each file holds the parameters that
the class made (random ones) and the scores that it gives for the rows of `cases`: outputs of the library, none of its code.
"""

import importlib
import importlib.util
import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.workloads import imported
from tests.dpiframe_core.importers.fuxictr.zoo.cases import CASES, ROWS, Case, config, encoded, write_run
from tests.dpiframe_core.importers.peers import randomized

STORED = Path(__file__).parent / "stored"


def own_class(repository: Path, name: str) -> type[torch.nn.Module]:
    """The class, from whichever file of the zoo has it."""
    for path in sorted(repository.glob("model_zoo/**/src/*.py")):
        if f"class {name}(" in path.read_text() and "_tf/" not in str(path):
            package = f"zoo_{name}"  # files of one model import one another
            spec = importlib.util.spec_from_file_location(
                package, path.with_name("__init__.py"), submodule_search_locations=[str(path.parent)]
            )
            sys.modules[package] = importlib.util.module_from_spec(spec)
            return getattr(importlib.import_module(f"{package}.{path.stem}"), name)
    raise SystemExit(f"no class {name} in {repository}/model_zoo")


def named_as_before() -> None:
    """Classes of the zoo that name an option as FuxiCTR's first versions did."""
    from fuxictr.pytorch.layers import FeatureEmbedding

    forward = FeatureEmbedding.forward

    def with_old_name(self: FeatureEmbedding, X: object, dynamic_emb_dim: bool = False, **options: object) -> torch.Tensor:
        return forward(self, X, **(options | ({"flatten_emb": True} if dynamic_emb_dim else {})))

    FeatureEmbedding.forward = with_old_name


def make(case: Case, repository: Path) -> None:
    from fuxictr.features import FeatureMap

    settings = config(case)
    with tempfile.TemporaryDirectory() as folder:
        write_run(case, Path(folder))
        feature_map = FeatureMap("d", folder)
        feature_map.load(f"{folder}/feature_map.json", settings)
        model = own_class(repository, case.model)(feature_map, **settings)
        kept = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}  # index lists, signs
        model = randomized(model, embeddings=0.5)
        model.load_state_dict(kept, strict=False)
    with torch.no_grad():  # far enough from one score for all rows
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm1d | torch.nn.LayerNorm) and module.weight is not None:
                module.weight.add_(1)
            elif isinstance(module, torch.nn.Linear):
                module.weight.mul_(1.5)
    values = {name: torch.from_numpy(column) for name, column in encoded(case.data).items()}
    keys = [f"{label}_pred" for label in case.labels] if len(case.labels) > 1 else ["y_pred"]
    for _ in range(12):
        with torch.no_grad():
            found = model(values)
            scores = torch.cat([found[key].reshape(ROWS, 1) for key in keys], 1)
            if scores.std(0).min() > 0.02:
                break
            for name, p in model.named_parameters():
                if name.endswith("weight") and p.ndim == 2 and "embedding" not in name:
                    p.mul_(1.3)
    tensors = {name: t.detach().clone() for name, t in model.state_dict().items()}
    save_file(tensors | {"expected": scores.contiguous()}, STORED / f"{case.name}.safetensors")
    print(f"{case.name}: {scores.min():.4f} to {scores.max():.4f}")


def shapes(repository: Path) -> dict[str, dict[str, list[int]]]:
    """Parameter -> sizes of each model of the benchmarks' size; of the tables of an embedding layer, `*`, the dim alone."""
    from fuxictr.features import FeatureMap

    out = {}
    for model in imported.SETTINGS:
        settings = imported.config(model)
        for key, value in settings.items():  # tuples, which the zoo's classes ask for
            if value and key.endswith("_field"):
                settings[key] = [tuple(group) for group in value]
        with tempfile.TemporaryDirectory() as folder:
            specs = imported.specifications(model)
            labels = ["click", "buy"] if isinstance(settings["task"], list) else ["click"]
            length = sum(spec.get("max_len", 1) for spec in specs.values())
            features = [{name: spec} for name, spec in specs.items()]
            whole = {"dataset_id": "d", "num_fields": len(specs), "total_features": 0, "input_length": length, "labels": labels}
            Path(folder, "feature_map.json").write_text(json.dumps(whole | {"features": features}))
            feature_map = FeatureMap("d", folder)
            feature_map.load(f"{folder}/feature_map.json", settings)
            made = own_class(repository, model)(feature_map, **settings)
        out[model] = sizes = {}
        state = made.state_dict()
        for name, t in state.items():
            head, _, table = name.rpartition("embedding_layers.")
            if t.is_floating_point() and all(f"{head}embedding_layers.{feature}.weight" in state for feature in specs):
                of_number = specs[table.removesuffix(".weight")]["type"] == "numeric"
                sizes[f"{head}embedding_layers.*.weight"] = [t.shape[0 if of_number else 1]]
            elif t.is_floating_point():
                sizes[name] = list(t.shape)
    return out


def main() -> None:
    repository, wanted = Path(sys.argv[1]), sys.argv[2:]
    STORED.mkdir(exist_ok=True)
    if not wanted or wanted == ["shapes"]:
        imported.SHAPES.write_text(json.dumps(shapes(repository), separators=(",", ":")) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        named_as_before()
        for case in CASES:
            if not wanted or case.name in wanted:
                try:
                    make(case, repository)
                except Exception as e:
                    print(f"{case.name}: FAILED {type(e).__name__}: {e}")


if __name__ == "__main__":
    main()
