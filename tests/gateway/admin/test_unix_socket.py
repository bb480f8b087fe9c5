"""The admin socket: its path, which users may use it, and the replacement of a stale socket."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.admin.unix_socket import SocketTakenError, listening, peer, socket_path
from tests.support.process import configuration, gateway, launched

OTHER_USER = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder with a short path, because the path of a unix socket has a maximum length."""
    with tempfile.TemporaryDirectory(prefix="gw-") as name:
        yield Path(name) / "vllm-gateway"


def test_the_socket_path_depends_on_the_configurations_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = {"XDG_RUNTIME_DIR": "/run/user/7"}
    path = socket_path(tmp_path / "gateway.yaml", runtime)
    assert path.parent == Path("/run/user/7/vllm-gateway") and path.suffix == ".sock"
    monkeypatch.chdir(tmp_path)
    assert socket_path(Path("./gateway.yaml"), runtime) == path
    assert socket_path(Path("other.yaml"), runtime) != path
    assert socket_path(tmp_path / "gateway.yaml", {}).parent == Path(f"/tmp/vllm-gateway-{os.geteuid()}")


def test_a_link_that_changes_its_target_changes_nothing(tmp_path: Path) -> None:
    link, before = tmp_path / "gateway.yaml", tmp_path / "before.yaml"
    link.symlink_to(before)
    assert socket_path(link, {}) != socket_path(before, {})


def test_only_this_user_can_open_the_socket_and_it_is_removed_at_the_end(folder: Path) -> None:
    with listening(folder / "a.sock") as listener:
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "a.sock")]
        assert modes == [0o700, 0o600]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(folder / "a.sock"))
            accepted, _ = listener.accept()
            with accepted:
                assert peer(accepted) == (os.getpid(), os.geteuid())
    assert list(folder.iterdir()) == []


def test_a_folder_that_others_may_enter_is_closed_to_them(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with listening(folder / "a.sock"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_socket_of_a_dead_gateway_is_replaced_and_of_a_running_gateway_is_not(folder: Path) -> None:
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "a.sock"))
    with listening(folder / "a.sock") as living:
        with pytest.raises(SocketTakenError, match="another gateway"), listening(folder / "a.sock"):
            pass
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(folder / "a.sock"))
        living.accept()[0].close()


def test_the_socket_of_a_successor_is_not_removed(folder: Path) -> None:
    with listening(folder / "a.sock"):
        (folder / "a.sock").unlink()
        (folder / "a.sock").touch()
    assert (folder / "a.sock").exists()


def test_a_link_instead_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="belongs to another user"), listening(folder / "a.sock"):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, OTHER_USER, OTHER_USER)
    with pytest.raises(PermissionError, match="belongs to another user"), listening(folder / "a.sock"):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_disconnected_even_if_the_file_modes_allow_access(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched())) as one:
        socket_file = socket_path(one.folder / "gateway.yaml", {"XDG_RUNTIME_DIR": str(one.runtime)})
        for path, mode in ((one.runtime, 0o755), (socket_file.parent, 0o755), (socket_file, 0o666)):
            path.chmod(mode)
        request = "import socket, sys; s = socket.socket(1); s.connect(sys.argv[1]); s.sendall(b'GET /status HTTP/1.0\\r\\n\\r\\n')\n"
        command = ["/usr/bin/env", "python3", "-c", request + "print(s.recv(100))", str(socket_file)]
        other = subprocess.run(command, user=OTHER_USER, group=OTHER_USER, extra_groups=[], capture_output=True, text=True, timeout=30)
        assert "HTTP" not in other.stdout and ("b''" in other.stdout or "reset" in other.stderr or "Broken" in other.stderr)
        own = subprocess.run([sys.executable, *command[2:]], capture_output=True, text=True, timeout=30)
        assert "200 OK" in own.stdout


def test_a_gateway_without_a_socket_still_serves(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="gw-") as runtime:
        (Path(runtime) / "vllm-gateway").write_text("a file in the folder's place")
        with gateway(tmp_path, configuration(launched()), runtime=Path(runtime)) as one:
            assert one.request().status_code == 200
            assert "the admin socket cannot be opened, so commands cannot reach this gateway" in one.output
