"""Create self-signed certificates for ``localhost``."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificate(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    """Create a certificate with the subject ``name``. Return the files of the certificate and of its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
               "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return cert, key
