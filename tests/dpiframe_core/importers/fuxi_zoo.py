"""FuxiCTR's zoo models composed of the library's own layers, under the zoo's attribute names; the wheel ships only the layers.

The reader of a checkpoint sees nothing but these names. Runs are fitted by FuxiCTR's own feature processor.
"""

import json
import warnings
from pathlib import Path

import pandas
import torch
import yaml
from torch import nn

from tests.dpiframe_core.importers.peers import library, randomized

library("fuxictr")
layers = library("fuxictr.pytorch.layers")
activations = library("fuxictr.pytorch.layers.activations")
preprocess = library("fuxictr.preprocess")
features = library("fuxictr.features")
criteo = library("fuxictr.datasets.criteo")

NETWORK = {
    "batch_norm": False, "embedding_dim": 10, "net_dropout": 0, "task": "binary_classification", "hidden_units": [12, 7],
    "hidden_activations": "relu", "dnn_hidden_units": [12, 7], "dnn_activations": "relu", "cin_hidden_units": [5, 4],
    "num_cross_layers": 2, "model_structure": "parallel", "stacked_dnn_hidden_units": [9],
    "parallel_dnn_hidden_units": [12, 7], "use_low_rank_mixture": False, "low_rank": 3, "num_experts": 2,
    "top_mlp_units": [9], "bottom_mlp_units": [11], "top_mlp_activations": "relu", "bottom_mlp_activations": "relu",
    "interaction_op": "dot", "attention_hidden_units": [8], "attention_hidden_activations": "Dice",
    "attention_output_activation": None, "din_use_softmax": False,
}  # fmt: skip


class Zoo(nn.Module):
    """One model; `forward` follows the model's paper on the library's layers."""

    def __init__(self, feature_map, config):
        super().__init__()
        self.config, self.map = config, feature_map
        width, norm = feature_map.sum_emb_out_dim(), config["batch_norm"]

        def mlp(size, units, acts, out=None, last=None, normed=norm):
            if isinstance(acts, str) and acts.lower() == "dice":
                acts = [activations.Dice(u) for u in units]
            return layers.MLP_Block(
                input_dim=size, output_dim=out, hidden_units=list(units), hidden_activations=acts,
                output_activation=last, dropout_rates=config["net_dropout"], batch_norm=normed,
            )  # fmt: skip

        def dnn(key, size, out=None):
            return mlp(size, config[key], config["dnn_activations"], out)

        name, dim = config["model"], config["embedding_dim"]
        if name not in ("DIN", "DLRM"):
            self.embedding_layer = layers.FeatureEmbedding(feature_map, dim)
        if name == "DeepFM":
            self.fm = layers.FactorizationMachine(feature_map)
            self.mlp = mlp(width, config["hidden_units"], config["hidden_activations"], 1)
        elif name == "WideDeep":
            self.lr_layer = layers.LogisticRegression(feature_map, use_bias=False)
            self.dnn = mlp(width, config["hidden_units"], config["hidden_activations"], 1)
        elif name == "xDeepFM":
            self.dnn = dnn("dnn_hidden_units", width, 1) if config["dnn_hidden_units"] else None
            self.lr_layer = layers.LogisticRegression(feature_map, use_bias=False)
            self.cin = layers.CompressedInteractionNet(feature_map.num_fields, config["cin_hidden_units"])
        elif name == "DCN":
            self.dnn = dnn("dnn_hidden_units", width) if config["dnn_hidden_units"] else None
            self.crossnet = layers.CrossNet(width, config["num_cross_layers"])
            self.fc = nn.Linear(width + (config["dnn_hidden_units"] or [0])[-1], 1)
        elif name == "DCNv2":
            self._dcnv2(width, dnn)
        elif name == "DIN":
            self.embedding_layer = layers.FeatureEmbeddingDict(feature_map, dim)
            self.attention_layers = nn.ModuleList(
                layers.DIN_Attention(
                    dim * len(target), attention_units=config["attention_hidden_units"],
                    hidden_activations=config["attention_hidden_activations"],
                    output_activation=config["attention_output_activation"], use_softmax=config["din_use_softmax"],
                )
                for target in groups(config["din_target_field"])
            )  # fmt: skip
            self.dnn = mlp(width, config["dnn_hidden_units"], config["dnn_activations"], 1)
        elif name == "DLRM":
            self.numbers = [f for f, spec in feature_map.features.items() if spec["type"] == "numeric"]
            self.embedding_layer = layers.FeatureEmbedding(feature_map, dim, not_required_feature_columns=self.numbers)
            kind = config["bottom_mlp_activations"]
            self.bottom_mlp = mlp(len(self.numbers), config["bottom_mlp_units"], kind, dim, kind)
            count = feature_map.num_fields - len(self.numbers) + 1
            self.interact = layers.InnerProductInteraction(num_fields=count, output="inner_product")
            self.top_mlp = mlp(count * (count - 1) // 2 + dim, config["top_mlp_units"], config["top_mlp_activations"], 1)

    def _dcnv2(self, width, dnn):
        config, structure = self.config, self.config["model_structure"]
        if config["use_low_rank_mixture"]:
            self.crossnet = layers.CrossNetMix(
                width, config["num_cross_layers"], low_rank=config["low_rank"], num_experts=config["num_experts"]
            )
        else:
            self.crossnet = layers.CrossNetV2(width, config["num_cross_layers"])
        final = 0 if "stacked" in structure else width
        for part in ("stacked", "parallel"):
            if part in structure:
                setattr(self, f"{part}_dnn", dnn(f"{part}_dnn_hidden_units", width))
                final += config[f"{part}_dnn_hidden_units"][-1]
        self.fc = nn.Linear(final, 1)

    def forward(self, x):
        name = self.config["model"]
        if name == "DIN":
            return torch.sigmoid(self._din(x))
        if name == "DLRM":
            return torch.sigmoid(self._dlrm(x))
        e = self.embedding_layer(x)
        flat = e.flatten(1)
        if name == "DeepFM":
            return torch.sigmoid(self.fm(x, e) + self.mlp(flat))
        if name == "WideDeep":
            return torch.sigmoid(self.lr_layer(x) + self.dnn(flat))
        if name == "xDeepFM":
            return torch.sigmoid(self.lr_layer(x) + self.cin(e) + (self.dnn(flat) if self.dnn else 0))
        crossed = self.crossnet(flat)
        if name == "DCN":
            return torch.sigmoid(self.fc(torch.cat([crossed, *([self.dnn(flat)] if self.dnn else [])], 1)))
        structure = self.config["model_structure"]
        parts = [self.stacked_dnn(crossed) if "stacked" in structure else crossed]
        parts += [self.parallel_dnn(flat)] if "parallel" in structure else []
        return torch.sigmoid(self.fc(torch.cat(parts, 1)))

    def _din(self, x):
        e, dim = self.embedding_layer(x), self.config["embedding_dim"]
        pairs = zip(groups(self.config["din_target_field"]), groups(self.config["din_sequence_field"]), strict=True)
        for unit, (target, sequence) in zip(self.attention_layers, pairs, strict=True):
            query, keys = (torch.cat([e[f] for f in fields], -1) for fields in (target, sequence))
            pooled = unit(query, keys, x[sequence[0]].long() != 0)
            e.update(zip(sequence, pooled.split(dim, -1), strict=True))
        return self.dnn(self.embedding_layer.dict2tensor(e, flatten_emb=True))

    def _dlrm(self, x):
        # The zoo joins the numbers along their last dimension, which for columns of one dimension makes one long row: they
        # are taken as [n, 1] here, as it means them.
        z = self.bottom_mlp(torch.stack([x[f].float() for f in self.numbers], 1))
        vectors = torch.cat([self.embedding_layer(x), z[:, None]], 1)
        return self.top_mlp(torch.cat([self.interact(vectors), z], 1))


def groups(fields):
    return [list(f) if isinstance(f, tuple | list) else [f] for f in (fields if isinstance(fields, list) else [fields])]


def make_run(folder: Path, source: Path, columns, label, model, processor_class=preprocess.FeatureProcessor, **settings):
    """A run directory as FuxiCTR leaves it, of random weights; test.csv and the library's own scores on it beside it."""
    config = NETWORK | {"model": model, "dataset_id": "d", "feature_cols": columns, "label_col": label} | settings
    folder.mkdir(parents=True)
    rows = source.read_text().splitlines(keepends=True)
    cut = 1 + int(0.7 * (len(rows) - 1))
    (folder / "train.csv").write_text("".join(rows[:cut]))
    (folder / "test.csv").write_text("".join(rows[:1] + rows[cut:]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        processor = processor_class(feature_cols=columns, label_col=label, dataset_id="d", data_root=str(folder.parent))
        processor.data_dir = str(folder)
        for name, file in (("pickle_file", "feature_processor.pkl"), ("json_file", "feature_map.json"),
                           ("vocab_file", "feature_vocab.json")):  # fmt: skip
            setattr(processor, name, str(folder / file))
        processor.fit(processor.preprocess(processor.read_data(str(folder / "train.csv"))), min_categr_count=1)
        test = processor.preprocess(processor.read_data(str(folder / "test.csv"))).collect().to_dict(as_series=False)
        encoded = processor.transform(dict(test))
    feature_map = features.FeatureMap("d", str(folder))
    feature_map.load(str(folder / "feature_map.json"), config)
    net = randomized(Zoo(feature_map, config))
    x = {name: torch.tensor(encoded[name]) for name in feature_map.features if name in encoded}
    with torch.no_grad():
        scores = net(x)[:, 0].double().numpy()
    torch.save(net.state_dict(), folder / "checkpoint.model")
    (folder / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(config))))
    pandas.DataFrame({"score": scores}).to_csv(folder / "expected.csv", index=False, float_format="%.9f")
    return folder
