"""What is measured: the four paper models at Criteo-Kaggle size with seeded weights, and batches of ids for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from dpiframe_core.bundle.bundle import Bundle, Golden, GoldenSpec, Manifest, Provenance
from dpiframe_core.bundle.manifest import bundle_files
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Table
from dpiframe_core.graph.architecture import DCN, Architecture, DCNv2, DeepFM, WideDeep
from dpiframe_core.models.build import build_graph

# Published vocabulary sizes of Criteo Kaggle's 26 categorical fields, and its 13 numeric fields in 64 buckets each.
CRITEO = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652, 2173, 4,
    7046547, 18, 15, 286181, 105, 142572, *[64] * 13,
)  # fmt: skip
HIDDEN = (1024, 512, 256)
MODELS: dict[str, Architecture] = {
    "wide_deep": WideDeep(hidden_units=HIDDEN),
    "deepfm": DeepFM(hidden_units=HIDDEN),
    "dcn": DCN(cross_layers=6, hidden_units=HIDDEN),
    "dcnv2": DCNv2(cross_layers=3, hidden_units=HIDDEN),
}


@dataclass(frozen=True, eq=False)
class Workload:
    """One model: schema, seeded weights on a device, and a few golden rows scored by the reference in float64."""

    name: str
    architecture: Architecture
    schema: FeatureSchema
    dense: dict[str, torch.Tensor]
    tables: dict[str, torch.Tensor]

    @property
    def embedding_tables(self) -> list[torch.Tensor]:
        """A table a feature, in the order of the id columns."""
        return [self.tables[f.table] for f in self.schema.features]  # type: ignore[index]

    @property
    def first_order_tables(self) -> list[torch.Tensor]:
        """The same of dim 1; none for a model without a first-order term."""
        return [self.tables[f.first_order_table] for f in self.schema.features if f.first_order_table]

    def bundle(self, golden: Golden) -> Bundle:
        """The same weights as the bundle that the engine loads (nothing is written to disk)."""
        files = dict.fromkeys(bundle_files(self.schema), "0" * 64)
        manifest = Manifest(
            name=self.name, version="benchmark", architecture=self.architecture, schema=self.schema, files=files,
            provenance=Provenance(source="benchmarks"), golden=GoldenSpec(rows=golden.block.rows),
        )  # fmt: skip
        fingerprint = sha256(manifest.model_dump_json().encode()).hexdigest()  # caches of what warm-up learns go by it
        return Bundle(Path("benchmark"), manifest, self.dense, self.tables, {}, golden, None, fingerprint)


def schema_of(
    sizes: Sequence[int], dim: int, *, first_order: bool = False, dtype: str = "float32", bag: int = 1
) -> FeatureSchema:
    """One identity feature a size, all candidate-scoped, with `bag` ids each, summed."""
    tables = [Table(name=f"C{i}", rows=n, dim=dim, dtype=dtype) for i, n in enumerate(sizes)]
    if first_order:
        tables += [Table(name=f"w{i}", rows=n, dim=1) for i, n in enumerate(sizes)]
    features = [
        Categorical(
            name=f"C{i}", values="int", encoder=Identity(), table=f"C{i}",
            first_order_table=f"w{i}" if first_order else None, oov_id=0, max_values=bag,
        )
        for i in range(len(sizes))
    ]  # fmt: skip
    return FeatureSchema(features=tuple(features), tables=tuple(tables))


def workload(
    name: str,
    device: torch.device,
    *,
    dim: int = 16,
    sizes: Sequence[int] = CRITEO,
    seed: int = 0,
    architecture: Architecture | None = None,
) -> Workload:
    """A paper model with random weights of a trained model's scale. architecture: in place of the one `MODELS` has."""
    architecture = architecture or MODELS[name]
    schema = schema_of(sizes, dim, first_order=isinstance(architecture, WideDeep | DeepFM))
    generator = torch.Generator(device).manual_seed(seed)
    tables = {t.name: torch.randn(t.rows, t.dim, device=device, generator=generator) * 0.1 for t in schema.tables}
    dense = {}
    host = torch.Generator().manual_seed(seed)
    for parameter, shape in build_graph(architecture, schema).params.items():
        scale = 0.1 if len(shape) == 1 and parameter.endswith("bias") else shape[-1] ** -0.5
        dense[parameter] = torch.randn(shape, generator=host) * scale
    return Workload(name, architecture, schema, dense, tables)


def id_blocks(schema: FeatureSchema, rows: int, count: int, *, skew: str = "zipf", seed: int = 0) -> list[RowBlock]:
    """`count` different batches. zipf: exponent 1.1 over the vocabulary, ids by descending frequency; uniform: all alike."""
    rng = np.random.default_rng(seed)
    blocks = []
    for _ in range(count):
        block = RowBlock.allocate(schema.block_layout, rows)
        for feature in schema.features:
            size = schema.table(feature.table).rows  # type: ignore[arg-type]
            ids = block.column(schema.columns[feature.name])
            if skew == "uniform":
                ids[:] = rng.integers(0, size, ids.shape)
            else:
                ids[:] = np.searchsorted(_zipf_cdf(size), rng.random(ids.shape))
        blocks.append(block)
        wide_ids(block)  # now: no timed call pays for it
    return blocks


@lru_cache(maxsize=256)
def wide_ids(block: RowBlock) -> np.ndarray:
    """int32[rows, ids]: the block's ids as the peers take them. Always the same array for a block."""
    return block.wide_ids("candidate_ids")


@lru_cache(maxsize=64)
def _zipf_cdf(size: int) -> np.ndarray:
    """float64[size]: the exact distribution, so that no draw has to be rejected (8 MB a million rows)."""
    cumulative = np.cumsum(np.arange(1, size + 1, dtype=np.float64) ** -1.1)
    return cumulative / cumulative[-1]
