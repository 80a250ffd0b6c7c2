"""The memory that an import needs, measured in a process of its own: little, as the checkpoint is read where it lies."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

ROOT = Path(__file__).parents[3]
DIM, ROWS = 16, (1_500_000, 1_500_000, 1_500_000)  # 96 MB each
LARGEST = DIM * ROWS[0] * 4
PROGRAM = """
import json, sys, threading
from pathlib import Path
from dpiframe_core.importers.dlrm import facebook_dlrm
from dpiframe_core.importers.writing import write_import

def held():  # pages of files, which the kernel may drop at any time, not among them
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon:"))

def watch():
    while not over.wait(0.002):
        seen.append(held())

folder, over = Path(sys.argv[1]), threading.Event()
write_import(facebook_dlrm(folder / "small.pt", folder / "spec.yaml"), folder / "small")  # which imports what it needs
seen = [held()]
watcher = threading.Thread(target=watch)
watcher.start()
write_import(facebook_dlrm(folder / "large.pt", folder / "spec.yaml"), folder / "large")
over.set()
watcher.join()
print(json.dumps([len(seen), max(seen) - seen[0]]))
"""


def checkpoint(path: Path, rows: tuple[int, ...]) -> None:
    made = torch.Generator().manual_seed(1)
    tables = {f"emb_l.{i}.weight": torch.rand(n, DIM, generator=made) - 0.5 for i, n in enumerate(rows)}
    layers = {"bot_l.0": (DIM, 2), "top_l.0": (8, DIM + 6), "top_l.2": (1, 8)}
    dense = {f"{name}.weight": torch.rand(shape, generator=made) - 0.5 for name, shape in layers.items()}
    torch.save(tables | dense | {f"{name}.bias": torch.zeros(shape[0]) for name, shape in layers.items()}, path)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="what a process holds is read from Linux")
def test_an_import_needs_at_most_1_3_of_its_largest_table(tmp_path: Path) -> None:
    numbers = [{"kind": "dense", "name": f"n{i}"} for i in range(2)]
    features = [*numbers, *({"name": f"s{i}"} for i in range(3))]
    settings = {"arch_interaction_op": "dot", "arch_interaction_itself": False}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({"model": "DLRM_Net", "features": features, "settings": settings}))
    checkpoint(tmp_path / "small.pt", (50, 40, 30))
    checkpoint(tmp_path / "large.pt", ROWS)
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    looks, peak = json.loads(done.stdout)
    assert looks > 20, "nothing was measured"
    assert peak <= 1.3 * LARGEST, f"{peak / LARGEST:.2f} of the largest table"
    print(f"{peak / LARGEST:.2f} of the largest table, {looks} looks")
