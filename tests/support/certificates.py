"""Create self-signed certificates for ``localhost``."""

from __future__ import annotations

import subprocess
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def certificate(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    """Create a certificate with the subject ``name``. Return the files of the certificate and of its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "90",
               "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def dated(folder: Path, begins: datetime, expires: datetime, *more: tuple[datetime, datetime]) -> tuple[Path, Path]:
    """Create a certificate that is valid between two times, and append others with the times of ``more``. Return the files."""
    secret = ec.generate_private_key(ec.SECP256R1())
    chain = b"".join(_signed(secret, *dates).public_bytes(serialization.Encoding.PEM) for dates in ((begins, expires), *more))
    cert, key = folder / "cert.pem", folder / "key.pem"
    pkcs8 = serialization.PrivateFormat.PKCS8
    key.write_bytes(secret.private_bytes(serialization.Encoding.PEM, pkcs8, serialization.NoEncryption()))
    cert.write_bytes(chain)
    return cert, key


def _signed(secret: ec.EllipticCurvePrivateKey, begins: datetime, expires: datetime) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    builder = x509.CertificateBuilder(name, name, secret.public_key(), x509.random_serial_number(), begins, expires)
    return builder.sign(secret, hashes.SHA256())
