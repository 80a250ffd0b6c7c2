"""The command as a user types it, as far as it goes without starting anything: errors are one line, exit codes 1 and 2."""

import platform
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from deployments.config_clients import Access
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.graph.architecture import DeepFM
from tests.deployments.command import dpiframe_here
from tests.runner import small_bundle

pytestmark = pytest.mark.bulk

DPIFRAME = str(Path(sys.executable).with_name("dpiframe"))
ROOT = Path(__file__).parents[3]


def dpiframe(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([DPIFRAME, *args], cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_the_versions_that_a_report_needs_are_one_line() -> None:
    done = dpiframe("--version")
    assert (done.returncode, done.stderr) == (0, "")
    versions = {name: metadata.version(name) for name in ("dpiframe", "torch", "ray")} | {"Python": platform.python_version()}
    assert done.stdout == ", ".join(f"{name} {version}" for name, version in versions.items()) + "\n"


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    done = dpiframe("--help")
    assert done.returncode == 0
    for command in ("serve", "demo", "inspect", "profile", "tune", "compress", "plan", "models", "check-config"):
        assert command in done.stdout
    _, commands = done.stdout.split("Commands")
    assert commands.index(" serve ") < commands.index(" demo ") < commands.index(" score ")  # what a newcomer wants comes first
    assert modules_after("import deployments.cli.main") & {"torch", "ray", "numpy", "fastapi", "matplotlib"} == set()


def test_the_launcher_does_not_wait_for_torch() -> None:
    assert modules_after("import deployments.serve.launcher") & {"torch", "ray", "fastapi"} == set()
    assert modules_after("import deployments.app, deployments.serve.launcher") & {"torch"} == set()


def test_check_config_says_ok_or_the_faults() -> None:
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").glob("*.yaml"))
    done = dpiframe("check-config", "--no-files", *files)
    said = [f"{file}: ok, without its files" for file in files]
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, said, "")


def test_check_config_fails_if_one_file_does(tmp_path: Path) -> None:
    small_bundle(tmp_path / "x", DeepFM(hidden_units=(4,)))
    (tmp_path / "good.yaml").write_text("models: [{path: x}]\n")
    (tmp_path / "bad.yaml").write_text("models: [{path: x}]\nreplicas: 0\nlog_level: loud\n")
    done = dpiframe("check-config", "good.yaml", "bad.yaml", "none.yaml", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == "good.yaml: ok\n"
    assert done.stderr.splitlines() == [
        "bad.yaml: replicas: got 0, expected greater than or equal to 1",
        "bad.yaml: log_level: got 'loud', expected 'debug', 'info', 'warning' or 'error'",
        "none.yaml: got 'No such file or directory', expected a readable file",
    ]


def test_check_config_looks_at_the_files_unless_it_is_told_that_they_are_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("models: [{path: gone}]\naccess: {tokens: t.yaml}\n")
    done = dpiframe_here("check-config", "x.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        f"x.yaml: models.0.path: got '{tmp_path}/gone', expected the directory of a model bundle (no model.yaml in it)",
        f"x.yaml: access.tokens: {tmp_path}/t.yaml: got 'No such file or directory', expected a readable file of tokens",
    ]
    done = dpiframe_here("check-config", "--no-files", "x.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "x.yaml: ok, without its files\n")


def test_check_config_waits_neither_for_ray_nor_for_torch() -> None:
    assert modules_after("import deployments.preflight.named_files") & {"torch", "ray", "fastapi"} == set()


def test_a_missing_bundle_is_one_line_before_anything_starts(tmp_path: Path) -> None:
    done = dpiframe("serve", "--bundle", "nothing", cwd=tmp_path)
    assert done.returncode == 1
    assert (
        done.stderr
        == f"error: models.0.path: got '{tmp_path}/nothing', expected the directory of a model bundle (no model.yaml in it)\n"
    )


def test_a_taken_port_is_one_line_before_anything_starts(tmp_path: Path) -> None:
    small_bundle(tmp_path / "b", DeepFM(hidden_units=(4,)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = dpiframe("serve", "--bundle", str(tmp_path / "b"), "--port", str(port))
    assert done.returncode == 1
    expected = "expected a free port on 127.0.0.1; try --port"
    assert done.stderr == f"error: http.port: got {port} (Address already in use), {expected}\n"


@pytest.mark.parametrize(
    "args",
    [
        ("serve",),
        ("serve", "--config", "x.yaml", "--bundle", "y"),
        ("serve", "--bundle", "x", "--device", "tpu"),
        ("inspect",),
        ("profile", "x", "--batch", "0", "-o", "x.json"),
        ("profile", "x", "--batch", "5"),
        ("tune", "x"),
        ("tune", "x", "--histogram", "y", "--device", "cuda"),
        ("compress", "x", "--table-dtype", "int8"),
        ("compress", "x", "--table-dtype", "int4", "-o", "y"),
        ("compress", "x", "-o", "y"),
        ("compress", "x", "-o", "y", "--prune", "1"),
        ("compress", "x", "-o", "y", "--table-dtype", "int8", "--trace", "z.csv"),
        ("compress", "x", "-o", "y", "--prune", "0.2", "--rows", "z.csv"),
        ("compress", "x", "-o", "y", "--prune", "0.2", "--label", "click"),
        ("compress", "x", "-o", "y", "--prune", "0.2", "--splitter", "tags"),
        ("plan", "x"),
        ("plan", "x", "--hbm-gib", "1", "--trace", "y", "--zipf", "1"),
        ("plan", "x", "--hbm-gib", "1", "--device", "cpu"),
    ],
    ids=" ".join,
)
def test_a_wrong_usage_exits_with_2(args: tuple[str, ...]) -> None:
    done = dpiframe_here(*args)
    assert done.returncode == 2
    assert "Usage: " in done.stderr


def test_a_command_that_does_not_exist_exits_with_2() -> None:
    done = dpiframe("sevre")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_options_override_the_file(tmp_path: Path) -> None:
    from deployments.cli.main import _settings

    file = tmp_path / "x.yaml"
    file.write_text("models: [{path: m}]\nhttp: {host: 0.0.0.0, port: 9000}\naccess: {open: true}\nreplicas: 2\n")
    config = _settings(file, None, None, 9001, "cpu", "fp32")
    assert (config.http.host, config.http.port, config.device, config.precision) == ("0.0.0.0", 9001, "cpu", "fp32")
    assert (config.replicas, config.models[0].path) == (2, "m")


def test_tokens_and_open_let_other_hosts_in_and_one_of_them_must_be_there(tmp_path: Path) -> None:
    from deployments.cli.main import _settings
    from dpiframe_core.errors import ConfigError

    bundle = tmp_path / "b"
    config = _settings(None, bundle, "0.0.0.0", None, None, None, Path("t.yaml"))
    assert config.access is not None
    assert config.access.tokens == "t.yaml"
    assert _settings(None, bundle, "0.0.0.0", None, None, None, None, True).access == Access(open=True)
    with pytest.raises(ConfigError, match=r"command line: http\.host: got '0\.0\.0\.0' without access"):
        _settings(None, bundle, "0.0.0.0", None, None, None)
    with pytest.raises(ConfigError, match=r"access\.tokens: got both it and open: true"):
        _settings(None, bundle, None, None, None, None, Path("t.yaml"), True)
    done = dpiframe("serve", "--bundle", str(bundle), "--host", "0.0.0.0")
    assert done.returncode == 1
    assert done.stderr.startswith("error: command line: http.host: got '0.0.0.0' without access, expected ")
    assert len(done.stderr.splitlines()) == 1


def test_a_service_says_every_way_in(capsys: pytest.CaptureFixture[str]) -> None:
    from deployments.cli.main import _announce
    from deployments.config import parse_config
    from deployments.serve.launcher import Endpoint

    ways = {"direct_port": 8002, "direct_socket": "/run/d[1].sock", "tls": {"certificate": "c.pem", "host": "127.0.0.1"}}
    config = parse_config({"models": [{"path": "m"}], "http": ways, "access": {"open": True}, "grpc": {}}, "ways")
    _announce(Endpoint("http://127.0.0.1:8000", "http://127.0.0.1:9090/metrics", config))
    assert capsys.readouterr().out.splitlines()[1:] == [
        "Direct port at 127.0.0.1:8002",
        "Unix socket at /run/d[1].sock",
        "TLS at 127.0.0.1:8443",
        "gRPC at 127.0.0.1:8001",
        "Prometheus metrics at http://127.0.0.1:9090/metrics",
    ]


def test_token_prints_the_line_of_the_file_and_beside_it_the_token(tmp_path: Path) -> None:
    from deployments.access.gate import Gate

    done = dpiframe("token", "ranker", "--scope", "score", "--scope", "metrics")
    assert done.returncode == 0, done.stderr
    (said,) = done.stderr.splitlines()
    secret = said.split()[-1]
    assert secret not in done.stdout
    (tmp_path / "t.yaml").write_text(done.stdout)
    Gate(str(tmp_path / "t.yaml")).require([(b"authorization", f"Bearer {secret}".encode())], "metrics")
    for where, *wrong in (("name", "a b", "--scope", "score"), ("scope", "a", "--scope", "all")):
        done = dpiframe_here("token", *wrong)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"error: {where}: got ")
    assert dpiframe_here("token", "a").returncode == 2


def test_inspect_of_something_else_than_a_bundle_is_one_line(tmp_path: Path) -> None:
    done = dpiframe_here("inspect", str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ")


def test_tune_prints_the_configuration_and_reports_beside_it(tmp_path: Path) -> None:
    bundle = small_bundle(tmp_path / "small", DeepFM(hidden_units=(16, 8)))
    (tmp_path / "sizes.json").write_text('{"max_batch_rows": 64, "counts": {"40": 7}}')
    done = dpiframe_here(
        "tune", str(bundle.path), "--histogram", "sizes.json", "--buckets", "2", "-o", "out.json", cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "batching:\n  max_batch_rows: 64\n  buckets: [40, 64]\n"), done.stderr
    assert done.stderr.splitlines()[0] == "small 1: 7 batches recorded, of 40 rows in the median"
    assert (tmp_path / "out.json").exists()
    done = dpiframe_here("tune", str(bundle.path), "--histogram", "none.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        1,
        "error: none.json: got 'No such file or directory', expected a readable file\n",
    )


def test_compress_says_how_far_the_scores_are_off(tmp_path: Path) -> None:
    bundle = small_bundle(tmp_path / "small", DeepFM(hidden_units=(16, 8)))
    command = ("compress", str(bundle.path), "--table-dtype", "int8", "-o", "out", "--only", "c1", "--only", "c2")
    done = dpiframe_here(*command, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["c1", "c2", "small", "golden", "golden.tolerance:"]
    assert [t.name for t in read_bundle(tmp_path / "out").manifest.feature_schema.tables if t.dtype == "int8"] == ["c1", "c2"]
    done = dpiframe_here(*command, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "error: --out: got 'out', expected a path where nothing is yet\n")


def test_plan_prints_where_rows_go_and_writes_the_placement(tmp_path: Path) -> None:
    bundle = small_bundle(tmp_path / "small", DeepFM(hidden_units=(16, 8)))
    options = ("--hbm-gib", "0.000002", "--gpus", "2", "-o", "out", "--measure", "--device", "cpu")
    done = dpiframe_here("plan", str(bundle.path), *options, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].split()[:2] == ["table", "rows"]
    predicted, measured = done.stdout.splitlines()[-2:]
    assert predicted.startswith("predicted lookup of 1,000 rows: ")
    assert measured.startswith("measured on cpu: ")
    assert (tmp_path / "out" / "placement.json").exists()
    done = dpiframe_here("plan", str(bundle.path), "--hbm-gib", "0", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: hbm_gib: got 0, 0 bytes, expected at least ")


def test_profile_says_what_it_wrote(tmp_path: Path) -> None:
    bundle = small_bundle(tmp_path / "small", DeepFM(hidden_units=(16, 8)))
    done = dpiframe_here("profile", str(bundle.path), "--batch", "5", "--device", "cpu", "-o", "trace.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "written: trace.json (open it in ui.perfetto.dev)"
    done = dpiframe_here("profile", str(bundle.path), "--batch", "5", "-o", "none/trace.json", cwd=tmp_path)
    expected = "expected a file in a folder that exists; none does not"
    assert (done.returncode, done.stderr) == (1, f"error: --out: got 'none/trace.json', {expected}\n")
