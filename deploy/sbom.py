"""Writes what a wheel of the gateway brings along, as a bill of materials (CycloneDX 1.6, JSON), beside the wheel. Run by `make sbom`.

The rule: nothing is listed by hand. An empty environment gets the wheel and what the lock says, and the bill is of what is in there then.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / ".venv-deploy-cyclonedx" / "bin" / "cyclonedx-py"
LOCK = ROOT / "deploy" / "docker" / "runtime.lock"
_DYNAMIC = 'dynamic = ["version"]'


def main(wheel: Path) -> int:
    """Run the command and return its exit code; failed commands have printed the reason."""
    version = wheel.name.split("-")[1]
    bill = wheel.with_name(f"vllm-gateway-{version}.cdx.json")
    try:
        with tempfile.TemporaryDirectory() as folder:
            python = environment(Path(folder) / "environment", wheel)
            project = Path(folder) / "pyproject.toml"
            project.write_text(described(version))
            options = ["--output-reproducible", "--validate", "--sv", "1.6", "--pyproject", str(project), "--output-file", str(bill)]
            run(str(TOOL), "environment", *options, str(python))
    except subprocess.CalledProcessError as error:
        return error.returncode
    print(bill)
    return 0


def environment(folder: Path, wheel: Path) -> Path:
    """Create an environment with the gateway as released; return its interpreter."""
    venv.create(folder)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run(*pip, "--only-binary", ":all:", "--require-hashes", "--requirement", str(LOCK))
    run(*pip, str(wheel))
    return python


def described(version: str) -> str:
    """Return the project's description with its version, as the tool requires."""
    text = (ROOT / "pyproject.toml").read_text()
    assert _DYNAMIC in text
    return text.replace(_DYNAMIC, f'version = "{version}"')


def run(*command: str) -> None:
    subprocess.run(command, check=True, env={**os.environ, "PIP_NO_INPUT": "1"})  # noqa: S603  the commands above


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
