"""TorchRec's own sharding of tables by rows, as it is for inference: one process that drives all GPUs and has one batch.

Its quantised collection in float16, so that rows have as many bytes as ours; ids on the first GPU, where the sums are wanted.
TorchRec's path for training (a process a GPU, over NCCL) needs FBGEMM's training kernels, which are some GB.
"""

from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch

from benchmarks.gpus.grid import Set, cell_of, drawn
from benchmarks.gpus.group import Group
from benchmarks.gpus.one_sided import Bags, Tables, bags, deviation, table_values
from benchmarks.records.record import Record, record
from benchmarks.systems.cells import Failed
from benchmarks.workloads.blocks import wide_ids


def run(
    group: Group, sets: Sequence[Set], batches: Sequence[int], poolings: Sequence[int], gpus: int, failed: Failed, *,
    seconds: float, seed: int,
) -> Iterator[Record]:  # fmt: skip
    """A record a cell, launched anew each time: what it does cannot be captured, for it asks for lengths."""
    for of in sets:
        for pooling in poolings:
            own = bags(of.tables, of.rows, of.dim, pooling)
            values = table_values(own.schema, seed)
            try:
                lookup = sharded(own, values, gpus, group.device)
                for batch in batches:
                    yield _measured(group, of, own, values, lookup, batch, gpus, seconds, seed)
            except Exception as failure:
                failed(f"torchrec {of} {pooling}", failure)
                yield record("tiers", "torchrec", cell=cell_of(gpus, of, pooling), error=str(failure)[:300])


def _measured(
    group: Group, of: Set, own: Bags, values: Tables, lookup: Callable[[torch.Tensor], torch.Tensor], batch: int, gpus: int,
    seconds: float, seed: int,
) -> Record:  # fmt: skip
    blocks = drawn(own, batch, seed)
    ids = [torch.from_numpy(wide_ids(b)).int().to(group.device) for b in blocks]

    def call(i: int) -> torch.Tensor:
        found = lookup(ids[i % len(ids)])
        if found.is_cuda:
            torch.cuda.synchronize(found.device)
        return found

    error = deviation(call(0), values, blocks[0], own.pooling)
    times = group.times(call, seconds)
    return record("tiers", "torchrec", batch=batch, cell=cell_of(gpus, of, own.pooling), times=times, max_abs_err=error)


def sharded(own: Bags, values: Tables, gpus: int, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """ids int32[rows, tables * pooling] -> [rows, tables * dim]."""
    from torchrec.distributed.fused_params import FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS
    from torchrec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder, ShardedQuantEmbeddingBagCollection
    from torchrec.distributed.shard import _shard_modules
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
    from torchrec.quant.embedding_modules import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    names = list(values)
    tables = [
        EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name],
                           pooling=PoolingType.SUM, data_type=DataType.FP16)
        for t in own.schema.tables
    ]  # fmt: skip
    whole = EmbeddingBagCollection(
        tables=tables, is_weighted=False, device=torch.device("meta"), output_dtype=torch.float16
    )  # fmt: skip
    rows = own.schema.tables[0].rows
    part = -(-rows // gpus)
    parts = [min(part, rows - i * part) for i in range(gpus)]
    kind = device.type
    sharder = QuantEmbeddingBagCollectionSharder(fused_params={FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS: True})
    plan = construct_module_sharding_plan(
        whole, {t: row_wise((parts, kind)) for t in names}, sharder=sharder, local_size=gpus, world_size=gpus, device_type=kind
    )
    # Its state dict by rows takes quantised tables alone, and we fill them without it.
    with mock.patch.object(ShardedQuantEmbeddingBagCollection, "_initialize_torch_state"):
        found = _shard_modules(
            module=torch.nn.Sequential(whole), device=device, plan=ShardingPlan({"0": plan}), sharders=[sharder],
            env=ShardingEnv.from_local(world_size=gpus, rank=0),
        )  # fmt: skip
    for held, config in found[0].tbes_configs().items():
        for (weight, _), table in zip(
            held.split_embedding_weights(split_scale_shifts=False), config.embedding_tables, strict=True
        ):
            begin = table.local_metadata.shard_offsets[0]
            rows_here = values[table.name][begin : begin + table.local_rows].contiguous().view(torch.uint8)
            weight[: table.local_rows, : rows_here.shape[1]].copy_(rows_here)

    def call(ids: torch.Tensor) -> torch.Tensor:
        by_table = ids.view(len(ids), len(names), own.pooling).transpose(0, 1).reshape(-1)
        lengths = torch.full((len(names) * len(ids),), own.pooling, dtype=torch.int32, device=ids.device)
        with torch.inference_mode():
            sums: torch.Tensor = found(KeyedJaggedTensor(keys=names, values=by_table, lengths=lengths)).values()
            return sums

    return call
