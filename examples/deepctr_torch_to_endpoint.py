"""From training with DeepCTR-Torch to an endpoint for raw values, in one file.

    python examples/deepctr_torch_to_endpoint.py             train, import, serve one request over HTTP, stop
    python examples/deepctr_torch_to_endpoint.py --no-serve  stop before the endpoint

Needs DeepCTR-Torch (pip install deepctr-torch), beside DPIFrame.
"""

import argparse
import csv
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from deepctr_torch.inputs import DenseFeat, SparseFeat
from deepctr_torch.models import DeepFM

from dpiframe_core.importers.deepctr.checkpoint import deepctr_torch_checkpoint
from dpiframe_core.importers.writing import write_import

ROWS = 4000
rng = np.random.default_rng(7)


def click_log() -> dict[str, np.ndarray]:
    """Raw columns: who, which ad, at what price, and whether it was clicked. Users like one of the categories of ads."""
    user, ad = rng.integers(0, 200, ROWS), rng.integers(0, 50, ROWS)
    price = rng.gamma(2.0, 20.0, ROWS)
    logit = 2.0 * (user % 5 == ad % 5) - 0.03 * price - 0.2
    click = rng.random(ROWS) < 1 / (1 + np.exp(-logit))
    return {
        "user": np.array([f"u{i}" for i in user]),
        "ad": np.array([f"ad-{i}" for i in ad]),
        "price": price.round(2),
        "click": click.astype(int),
    }


def vocabulary(values: np.ndarray) -> dict[str, int]:
    """Raw value -> id from 2 on; 0 is for missing values, 1 for unknown ones."""
    return {str(value): i for i, value in enumerate(sorted(set(values)), 2)}


def main(serve: bool, folder: Path) -> None:
    log = click_log()
    users, ads = vocabulary(log["user"]), vocabulary(log["ad"])
    highest = float(log["price"].max())

    # 1. Train, as always.
    columns = [SparseFeat("user", len(users) + 2, 8), SparseFeat("ad", len(ads) + 2, 8), DenseFeat("price")]
    inputs = {
        "user": np.array([users[v] for v in log["user"]]),
        "ad": np.array([ads[v] for v in log["ad"]]),
        "price": (log["price"] / highest).astype(np.float32),
    }
    model = DeepFM(columns, columns, dnn_hidden_units=(32, 16), dnn_use_bn=True, device="cpu")
    model.compile(torch.optim.Adam(model.parameters(), 0.01), "binary_crossentropy", metrics=["auc"])
    model.fit(inputs, log["click"], batch_size=256, epochs=3, verbose=0)
    torch.save(model.state_dict(), folder / "deepfm.pt")

    # 2. Say what the checkpoint does not: features, and how raw values become what the model saw.
    (folder / "user.json").write_text(json.dumps(users))
    (folder / "ad.json").write_text(json.dumps(ads))
    category = {"values": "string", "missing_id": 0, "oov_id": 1}
    spec = {
        "model": "DeepFM",
        "features": [
            {"name": "user", "vocabulary": "user.json", "scope": "context", **category},
            {"name": "ad", "vocabulary": "ad.json", **category},
            {
                "kind": "dense",
                "name": "price",
                "transforms": [{"type": "minmax", "minimum": 0.0, "maximum": highest}],
                "missing_value": 0.0,
            },
        ],
        "settings": {"task": "binary", "dnn_activation": "relu", "use_fm": True},
    }
    (folder / "spec.yaml").write_text(json.dumps(spec))  # JSON is YAML

    # 3. Import, compared with the library's own predictions on raw rows.
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(log)
        writer.writerows(zip(*log.values(), strict=True))
    scores = model.predict(inputs, batch_size=512)[:, 0]
    (folder / "expected.csv").write_text("score\n" + "".join(f"{p:.9f}\n" for p in scores))
    source = deepctr_torch_checkpoint(folder / "deepfm.pt", folder / "spec.yaml")
    bundle = folder / "bundle"
    print(write_import(source, bundle, rows=folder / "rows.csv", expected=folder / "expected.csv", label="click").report())

    # 4. Serve it. `dpiframe serve --bundle BUNDLE` does the same for good.
    if serve:
        import httpx

        from deployments.config import parse_config
        from deployments.serve.host import free_port_from
        from deployments.serve.launcher import running

        config = parse_config({"models": [{"path": str(bundle)}], "http": {"port": free_port_from(8000)}}, "example")
        request = {"context": {"user": "u7"}, "candidates": {"ad": ["ad-2", "ad-3", "brand new"], "price": [9.5, 9.5, None]}}
        with running(config, print) as endpoint:
            print(httpx.post(f"{endpoint.url}/v1/score", json=request, timeout=30).raise_for_status().json()["scores"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-serve", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        main(not options.no_serve, Path(made))
