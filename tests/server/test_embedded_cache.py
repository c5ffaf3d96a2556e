"""A cached folder is whole or absent, whatever happened to it and however many processes want it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agentspec_runtime.embedded.cache import BuiltFolder, cache_root
from agentspec_runtime.errors import ModelError

SOURCE = "weights 1.0"


class Builder:
    """Writes two small files and counts how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "weights.bin").write_bytes(b"w" * 1000)
        (folder / "config.json").write_text("{}")


def quiet(line: str) -> None:
    del line


@pytest.fixture
def folder(tmp_path: Path) -> BuiltFolder:
    return BuiltFolder(tmp_path / "models" / "m", needed_bytes=1000)


@pytest.fixture
def built(folder: BuiltFolder) -> BuiltFolder:
    folder.ensure(SOURCE, Builder(), quiet)
    return folder


def test_builds_once_and_then_uses_it(folder: BuiltFolder):
    build = Builder()
    assert folder.problem(SOURCE) == "not built yet"
    path = folder.ensure(SOURCE, build, quiet)
    assert folder.ensure(SOURCE, build, quiet) == path
    assert build.calls == 1
    assert (path / "weights.bin").stat().st_size == 1000
    assert folder.problem(SOURCE) is None


def flip_a_byte(path: Path) -> None:
    data = bytearray((path / "weights.bin").read_bytes())
    stamp = (path / "weights.bin").stat()
    data[500] ^= 1
    (path / "weights.bin").write_bytes(data)
    os.utime(path / "weights.bin", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # a bad disk tells nobody


def truncate(path: Path) -> None:
    os.truncate(path / "weights.bin", 999)


def delete_a_file(path: Path) -> None:
    (path / "config.json").unlink()


def delete_the_marker(path: Path) -> None:
    (path / ".agentspec-built.json").unlink()


def spoil_the_marker(path: Path) -> None:
    (path / ".agentspec-built.json").write_text('{"source": 1')


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip_a_byte, "weights.bin is not what was built"),
        (truncate, "weights.bin is not what was built"),
        (delete_a_file, "config.json cannot be read"),
        (delete_the_marker, "did not finish"),
        (spoil_the_marker, "marker file is unreadable"),
    ],
)
def test_damage_is_seen_and_repaired(built: BuiltFolder, damage, said: str):
    damage(built.path)
    assert said in str(built.problem(SOURCE))
    lines: list[str] = []
    build = Builder()
    built.ensure(SOURCE, build, lines.append)
    assert build.calls == 1
    assert said in lines[0]
    assert built.problem(SOURCE) is None
    assert sorted(path.name for path in built.path.parent.iterdir()) == [".m.lock", "m"]


def test_other_source_builds_anew_unless_it_is_gone(built: BuiltFolder):
    assert "weights 2.0 is installed" in str(built.problem("weights 2.0"))
    assert built.problem(None) is None
    build = Builder()
    built.ensure("weights 2.0", build, quiet)
    assert build.calls == 1


def test_failed_build_leaves_nothing_behind(folder: BuiltFolder):
    def build(path: Path) -> None:
        (path / "half").write_bytes(b"x")
        raise ModelError("the conversion failed")

    with pytest.raises(ModelError, match="conversion failed"):
        folder.ensure(SOURCE, build, quiet)
    assert [path.name for path in folder.path.parent.iterdir()] == [".m.lock"]


def test_remains_of_a_killed_build_are_cleared(folder: BuiltFolder):
    stale = folder.path.parent / ".building-dead"
    stale.mkdir(parents=True)
    (stale / "half").write_bytes(b"x" * 1000)
    folder.ensure(SOURCE, Builder(), quiet)
    assert not stale.exists()


def test_full_disk_is_seen_before_the_work(tmp_path: Path):
    build = Builder()
    with pytest.raises(ModelError, match=r"MiB free and this needs .*AGENTSPEC_CACHE"):
        BuiltFolder(tmp_path / "m", needed_bytes=1 << 60).ensure(SOURCE, build, quiet)
    assert build.calls == 0


def test_disk_that_fills_up_meanwhile_is_a_clear_error(folder: BuiltFolder):
    def build(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ModelError, match=r"no space left for .*AGENTSPEC_CACHE"):
        folder.ensure(SOURCE, build, quiet)
    assert not folder.path.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux")
def test_device_that_is_really_full_leaves_the_old_folder(built: BuiltFolder):
    """No room for the new version: the kernel's own error, the old folder is still there and still whole."""

    def build(path: Path) -> None:
        (path / "half").write_bytes(b"x")
        Path("/dev/full").write_bytes(b"x" * 100_000)

    with pytest.raises(ModelError, match=r"no space left for .*AGENTSPEC_CACHE"):
        built.ensure("weights 2.0", build, quiet)
    assert built.problem(SOURCE) is None
    assert sorted(path.name for path in built.path.parent.iterdir()) == [".m.lock", "m"]


@pytest.mark.parametrize("limit", [0, 500, 1100], ids=["no byte", "half the weights", "all but the marker"])
def test_writes_that_fail_anywhere_leave_nothing_behind(tmp_path: Path, limit: int):
    """The process may write no file larger than `limit` bytes; the lock file stays empty and can be made."""
    script = textwrap.dedent(
        """
        import resource, sys
        from pathlib import Path
        from agentspec_runtime.embedded.cache import BuiltFolder
        from agentspec_runtime.errors import ModelError

        def build(folder):
            for i in range(20):
                (folder / f"weights-{i}.bin").write_bytes(b"w" * 1000)

        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
        try:
            BuiltFolder(Path(sys.argv[1]), needed_bytes=1).ensure("s", build, lambda line: None)
        except ModelError as error:
            print(error)
            sys.exit(3)
        """
    )
    command = [sys.executable, "-c", script, str(tmp_path / "m"), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "")
    assert "AGENTSPEC_CACHE" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == [".m.lock"]


def test_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelError, match=r"cannot write .*AGENTSPEC_CACHE"):
        BuiltFolder(tmp_path / "file" / "m", needed_bytes=1).ensure(SOURCE, Builder(), quiet)


def test_two_processes_build_it_once(tmp_path: Path):
    """Both start while nothing is there; the slower one waits for the lock and finds it done."""
    script = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from agentspec_runtime.embedded.cache import BuiltFolder

        def build(folder):
            with open(sys.argv[2], "a") as log:
                log.write("built\\n")
            time.sleep(0.5)
            (folder / "weights.bin").write_bytes(b"w" * 1000)

        BuiltFolder(Path(sys.argv[1]), needed_bytes=1).ensure("s", build, lambda line: None)
        """
    )
    log = tmp_path / "log"
    command = [sys.executable, "-c", script, str(tmp_path / "m"), str(log)]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert log.read_text() == "built\n"
    assert BuiltFolder(tmp_path / "m", needed_bytes=1).problem("s") is None


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("AGENTSPEC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "agentspec"
    monkeypatch.setenv("AGENTSPEC_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    monkeypatch.delenv("AGENTSPEC_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "agentspec"
