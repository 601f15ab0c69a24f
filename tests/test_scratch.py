"""Temporary directories: those of dead processes go, all others stay."""

import os
import subprocess
import sys
import time

from kdgen import scratch


def test_only_old_directories_of_dead_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = {
        "old, dead": f"kdgen-host-{ended.pid}-a", "new, dead": f"kdgen-host-{ended.pid}-b", "mine": f"kdgen-verify-{os.getpid()}-c",
        "another's": f"other-{ended.pid}-d", "no number": "kdgen-host-abc",
    }  # fmt: skip
    for what, name in names.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
        if what != "new, dead":
            os.utime(tmp_path / name, (time.time() - 3600,) * 2)
    scratch.remove_orphans.cache_clear()
    assert scratch.prefix("host") == f"kdgen-host-{os.getpid()}-"
    assert {path.name for path in tmp_path.iterdir()} == set(names.values()) - {names["old, dead"]}
