"""Certificates of localhost, made by the openssl of this host."""

import ssl
import subprocess
from pathlib import Path


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


def certificate(folder: Path, name: str, signed_by: tuple[Path, Path] | None = None) -> tuple[Path, Path]:
    """Of localhost, by its own key or another's."""
    pem, key = folder / f"{name}.crt", folder / f"{name}.key"
    by = [] if signed_by is None else ["-CA", str(signed_by[0]), "-CAkey", str(signed_by[1])]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-days", "2"]
    openssl(*new, *names, *by, "-keyout", str(key), "-out", str(pem))
    return pem, key


def trusting(*certificates: Path) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for pem in certificates:
        context.load_verify_locations(pem)
    return context
