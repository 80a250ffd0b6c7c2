"""Makes the stored cases from RecBole's own classes: python -m tests.dpiframe_core.importers.recbole.make

Needs RecBole 1.2 on the path. Each file holds the parameters that the class made (random ones) and the scores that it gives
for the rows of `cases`: outputs of the library, none of its code.
"""

import importlib
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.dpiframe_core.importers.peers import randomized
from tests.dpiframe_core.importers.recbole import history_cases as histories
from tests.dpiframe_core.importers.recbole.cases import CASES, LISTS, NUMBERS, TOKENS, Case, encoded

STORED = Path(__file__).parent / "stored"


class Config(dict):
    """RecBole's reads as None what is not set."""

    def __missing__(self, key):
        return None


class Dataset:
    """What the models ask a RecBole data set: its fields, their types and how many ids each has."""

    def __init__(self, case: Case) -> None:
        from recbole.utils import FeatureType

        self._fields = case.fields
        kinds = dict.fromkeys(NUMBERS, FeatureType.FLOAT) | dict.fromkeys(TOKENS, FeatureType.TOKEN)
        self.field2type = kinds | dict.fromkeys(LISTS, FeatureType.TOKEN_SEQ)

    def fields(self, source=None):
        return list(self._fields)

    def num(self, name):
        return 2 if name in NUMBERS else TOKENS[name] + 1


class Histories(Dataset):
    """What the models ask a sequential data set beside: what its users and items have."""

    def __init__(self, case: Case, config: Config) -> None:
        super().__init__(case)
        from recbole.utils import FeatureType

        self._case, self.config = case, config
        kinds = dict.fromkeys(case.fields, FeatureType.TOKEN) | dict.fromkeys(histories.NUMBERS, FeatureType.FLOAT)
        self.field2type = kinds | dict.fromkeys(histories.LISTS, FeatureType.TOKEN_SEQ)

    def num(self, name):
        return 2 if name in histories.NUMBERS else histories.TOKENS[name] + 1

    def _feature(self, names):
        from recbole.data.interaction import Interaction

        own = [name for name in names if name in self._case.fields]
        return Interaction({name: torch.from_numpy(histories.catalogue(name)) for name in own})

    def get_user_feature(self):
        return self._feature(histories.USER)

    def get_item_feature(self):
        return self._feature(histories.ITEM)


def with_wide_items(model) -> dict[str, torch.Tensor]:
    """The parameters with one row an item, of all its features, as the script of docs/import-recbole.md has them."""
    items = torch.arange(model.n_items).unsqueeze(0)
    parts = [e["item"] for e in model.embedding_layer(torch.zeros(1, dtype=torch.long), items) if e["item"] is not None]
    own = {name: t for name, t in model.state_dict().items() if "_table.item." not in name}
    return own | {"embedding_layer.token_embedding_table.item.embedding.weight": torch.cat(parts, 2)[0].flatten(1)}


OF_HISTORIES = Config(
    USER_ID_FIELD="user_id", ITEM_ID_FIELD="item_id", LIST_SUFFIX="_list", ITEM_LIST_LENGTH_FIELD="item_length",
    NEG_PREFIX="neg_", MAX_ITEM_LIST_LENGTH=histories.STEPS, numerical_features=list(histories.NUMBERS),
)  # fmt: skip


def make(case: Case) -> None:
    sequential = case in histories.CASES
    kind = "sequential" if sequential else "context_aware"
    module = importlib.import_module(f"recbole.model.{kind}_recommender.{case.model.lower()}")
    config = Config({"embedding_size": 4, "LABEL_FIELD": "label", "device": "cpu", "numerical_features": list(NUMBERS)})
    config |= {"double_tower": False, **(OF_HISTORIES if sequential else {}), **case.config}
    dataset = Histories(case, config) if sequential else Dataset(case)
    torch.manual_seed(1)
    model = randomized(getattr(module, case.model)(config, dataset), embeddings=1.5 if sequential else 0.5)
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, torch.nn.BatchNorm1d):
                part.weight.add_(1)
        columns = histories.encoded(case) if sequential else encoded(case)
        scores = model.predict({name: torch.from_numpy(v) for name, v in columns.items()}).reshape(-1, 1)
        state = with_wide_items(model) if sequential and histories.is_wide(case) else model.state_dict()
    tensors = {name: t.detach().clone() for name, t in state.items()}
    save_file(tensors | {"expected": scores.contiguous()}, STORED / f"{case.name}.safetensors")
    print(f"{case.name}: {scores.min():.4f} to {scores.max():.4f}")


if __name__ == "__main__":
    STORED.mkdir(exist_ok=True)
    for case in (*CASES, *histories.CASES):
        make(case)
