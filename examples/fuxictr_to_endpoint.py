"""From training with FuxiCTR to an endpoint for raw values, in one file.

    python examples/fuxictr_to_endpoint.py             train, import, serve one request over HTTP, stop
    python examples/fuxictr_to_endpoint.py --no-serve  stop before the endpoint

Needs FuxiCTR 2.3 (pip install fuxictr "polars<2"), beside DPIFrame. Its wheel has the layers but not the model zoo: DeepFM
below is composed of them under the zoo's attribute names.
"""

import argparse
import contextlib
import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
import torch
from fuxictr.features import FeatureMap
from fuxictr.preprocess import FeatureProcessor
from fuxictr.pytorch.layers import FactorizationMachine, FeatureEmbedding, MLP_Block

from deployments.serve.host import free_port_from
from dpiframe_core.importers.fuxictr.files import find_files
from dpiframe_core.importers.fuxictr.run import fuxictr
from dpiframe_core.importers.writing import write_import

ROWS = 3000
rng = np.random.default_rng(7)

PARAMS = {
    "model": "DeepFM",
    "dataset_id": "clicks",
    "task": "binary_classification",
    "embedding_dim": 8,
    "hidden_units": [32, 16],
    "hidden_activations": "relu",
    "batch_norm": True,
    "net_dropout": 0.1,
    "feature_cols": [
        {"name": ["user", "ad"], "active": True, "dtype": "str", "type": "categorical"},
        {"name": "price", "active": True, "dtype": "float", "type": "numeric", "normalizer": "StandardScaler"},
        {"name": "seen", "active": True, "dtype": "str", "type": "sequence", "splitter": "^", "max_len": 4, "padding": "pre",
         "share_embedding": "ad"},
    ],
    "label_col": {"name": "click", "dtype": "float"},
}  # fmt: skip


class DeepFM(torch.nn.Module):
    def __init__(self, feature_map: FeatureMap) -> None:
        super().__init__()
        self.embedding_layer = FeatureEmbedding(feature_map, PARAMS["embedding_dim"])
        self.fm = FactorizationMachine(feature_map)
        self.mlp = MLP_Block(
            input_dim=feature_map.sum_emb_out_dim(), output_dim=1, hidden_units=PARAMS["hidden_units"],
            hidden_activations=PARAMS["hidden_activations"], dropout_rates=PARAMS["net_dropout"],
            batch_norm=PARAMS["batch_norm"],
        )  # fmt: skip

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        embedded = self.embedding_layer(x)
        return torch.sigmoid(self.fm(x, embedded) + self.mlp(embedded.flatten(1)))


def write_click_log(path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["click", "user", "ad", "price", "seen"])
        for _ in range(ROWS):
            user, ad, price = int(rng.integers(100)), int(rng.integers(40)), float(rng.gamma(2.0, 20.0))
            logit = 2.0 * (user % 5 == ad % 5) - 0.03 * price - 0.2
            seen = "^".join(f"ad-{i}" for i in rng.integers(0, 40, rng.integers(0, 6)))
            writer.writerow([int(rng.random() < 1 / (1 + np.exp(-logit))), f"u{user}", f"ad-{ad}", f"{price:.2f}", seen])


def main(serve: bool, folder: Path) -> None:
    # 1. Train, as always: the feature processor learns vocabularies and scalers, and leaves its files in `run`.
    run = folder / PARAMS["dataset_id"]
    run.mkdir()
    write_click_log(run / "test.csv")
    processor = FeatureProcessor(
        feature_cols=PARAMS["feature_cols"], label_col=PARAMS["label_col"], dataset_id=PARAMS["dataset_id"],
        data_root=str(folder),
    )  # fmt: skip
    processor.fit(processor.preprocess(processor.read_data(str(run / "test.csv"))), min_categr_count=2)
    rows = processor.preprocess(processor.read_data(str(run / "test.csv"))).collect().to_dict(as_series=False)
    encoded = processor.transform(dict(rows))
    feature_map = FeatureMap(PARAMS["dataset_id"], str(run))
    feature_map.load(str(run / "feature_map.json"), PARAMS)
    x = {name: torch.tensor(encoded[name]) for name in feature_map.features}
    y = torch.tensor(encoded["click"]).float()[:, None]
    model = DeepFM(feature_map)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(5):
        for part in torch.randperm(ROWS).split(256):
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy(model({k: v[part] for k, v in x.items()}), y[part]).backward()
            optimizer.step()

    # 2. What a run leaves: the checkpoint, its parameters, and here the library's own scores as proof.
    torch.save(model.state_dict(), run / "deepfm.model")
    (run / "config.yaml").write_text(json.dumps(PARAMS))  # JSON is YAML
    with torch.no_grad():
        scores = model.eval()(x)[:, 0].tolist()
    (run / "expected.csv").write_text("score\n" + "".join(f"{p:.9f}\n" for p in scores))

    # 3. Import; `dpiframe import fuxictr RUN -o BUNDLE` does the same.
    bundle = folder / "bundle"
    source = fuxictr(find_files(run), context=["user", "seen"])
    print(write_import(source, bundle, rows=run / "test.csv", expected=run / "expected.csv").report())

    # 4. Serve it, in a process of its own: FuxiCTR has loaded Ray into this one, with other settings than Serve's.
    if serve:
        request = {"context": {"user": "u7", "seen": "ad-2^ad-9"}, "candidates": {"ad": ["ad-2", "new"], "price": [9.5, None]}}
        print(score_over_http(bundle, request))


def score_over_http(bundle: Path, request: dict[str, object]) -> list[float]:
    """As `dpiframe serve --bundle BUNDLE`, until one request is answered."""
    port = free_port_from(8000)
    command = [
        sys.executable,
        "-c",
        "from deployments.cli.main import command; command()",
        "serve",
        "--bundle",
        str(bundle),
        "--port",
        str(port),
    ]
    server = subprocess.Popen(command)
    try:
        while server.poll() is None:
            time.sleep(0.5)
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.post(f"http://127.0.0.1:{port}/v1/score", json=request, timeout=30)
                if answer.status_code == 200:
                    return list(answer.json()["scores"])
        raise RuntimeError(f"the server ended with {server.returncode}")
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-serve", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        main(not options.no_serve, Path(made))
