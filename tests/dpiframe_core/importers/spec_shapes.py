"""Makes `benchmarks/workloads/spec_shapes.json` from the libraries' classes.

    python -m tests.dpiframe_core.importers.spec_shapes

Needs RecBole 1.2 and DeepCTR-Torch 0.3 on the path. TorchRec's DLRM_DCN is the plain module of its names in `test_dlrm`.
"""

import importlib
import json

import torch

from benchmarks.workloads.imported import FIELDS, NUMBERS, STEPS, TOKENS
from benchmarks.workloads.imported_specs import ITEM, SHAPES, SPECS, USER
from tests.dpiframe_core.importers import test_dlrm
from tests.dpiframe_core.importers.recbole.make import Config

DIM, UNITS = 16, [400, 400, 400]
CATEGORIES, NUMERIC = [f"C{i}" for i in range(FIELDS)], [f"I{i}" for i in range(NUMBERS)]
RECBOLE = Config(
    embedding_size=DIM, mlp_hidden_size=UNITS, dropout_prob=0.0, dropout_probs=[0, 0, 0], reg_weight=0, LABEL_FIELD="label",
    device="cpu", double_tower=False, attention_size=64, n_layers=3, num_heads=2, has_residual=True, cross_layer_num=3,
    cin_layer_size=[100, 100, 100], direct=False, numerical_features=NUMERIC, USER_ID_FIELD="user", ITEM_ID_FIELD="item",
    LIST_SUFFIX="_list", ITEM_LIST_LENGTH_FIELD="item_length", NEG_PREFIX="neg_", MAX_ITEM_LIST_LENGTH=STEPS,
    pooling_mode="mean", gru_type="AUGRU", alpha=1.0,
)  # fmt: skip


class Dataset:
    """What the models ask a RecBole data set."""

    def __init__(self, sequential: bool) -> None:
        from recbole.utils import FeatureType

        self._fields, self.config = [*USER, *ITEM] if sequential else [*CATEGORIES, *NUMERIC], RECBOLE
        self.field2type = {n: FeatureType.FLOAT if n in NUMERIC else FeatureType.TOKEN for n in self._fields}

    def fields(self, source=None):
        return self._fields

    def num(self, name):
        return 2 if name in NUMERIC else TOKENS + 1

    def _feature(self, names):
        from recbole.data.interaction import Interaction

        return Interaction({name: torch.arange(TOKENS + 1) for name in names})

    def get_user_feature(self):
        return self._feature(USER)

    def get_item_feature(self):
        return self._feature(ITEM)


def of_recbole(name):
    sequential = name in ("DIN", "DIEN")
    kind = "sequential" if sequential else "context_aware"
    module = importlib.import_module(f"recbole.model.{kind}_recommender.{name.lower()}")
    config = Config(RECBOLE | {"numerical_features": []}) if sequential else RECBOLE
    return getattr(module, name)(config, Dataset(sequential))


def of_deepctr(name):
    from deepctr_torch import models
    from deepctr_torch.inputs import DenseFeat, SparseFeat

    features = [*(SparseFeat(n, TOKENS + 2, DIM) for n in CATEGORIES), *(DenseFeat(n, 1) for n in NUMERIC)]
    return getattr(models, name)(features, features, cross_num=3, dnn_hidden_units=UNITS)


def of_torchrec(name):
    plain = test_dlrm
    before = plain.SIZES, plain.DIM, plain.NUMBERS
    plain.SIZES, plain.DIM, plain.NUMBERS = [TOKENS + 2] * FIELDS, DIM, NUMBERS
    model = plain.TorchRec([512, 256], [512, 512, 256], rank=64)
    plain.SIZES, plain.DIM, plain.NUMBERS = before
    return model


def main() -> None:
    make = {"RecBole": of_recbole, "DeepCTR-Torch": of_deepctr, "TorchRec": of_torchrec}
    out = {}
    for whole in SPECS:
        library, name = whole.split(".")
        state = make[library](name).state_dict()
        own = {n.replace("embedding_bags.t_", "embedding_bags.C"): t for n, t in state.items() if t.is_floating_point()}
        out[whole] = {n: list(t.shape) for n, t in own.items()}
    SHAPES.write_text(json.dumps(out, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
