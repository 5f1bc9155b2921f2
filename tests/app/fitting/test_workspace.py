"""A workspace outlives no process, and knows which other processes live."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from boxcal.app.fitting.server.workspace import Workspace

HOLD = (
    "import sys, time; from pathlib import Path; from boxcal.app.fitting.server.workspace import Workspace; "
    "w = Workspace(Path(sys.argv[1])); (w.new_folder('upload') / 'logits.npy').write_bytes(b'x'); "
    "print(w.name, flush=True); time.sleep(60)"
)


def test_it_leaves_nothing_behind(tmp_path: Path) -> None:
    with Workspace(tmp_path) as workspace:
        (workspace.new_folder("upload") / "logits.npy").write_bytes(b"x")
        assert (tmp_path / "work" / workspace.name / "upload" / "logits.npy").exists()
    assert [path for path in (tmp_path / "work").iterdir() if path.is_dir()] == []


def test_two_in_one_process_see_each_other(tmp_path: Path) -> None:
    with Workspace(tmp_path) as one, Workspace(tmp_path) as other:
        assert one.sweep() == other.sweep() == {one.name, other.name}
    with Workspace(tmp_path) as alone:
        assert alone.sweep() == {alone.name}


def test_the_folder_of_a_killed_process_is_removed_and_a_living_one_stays(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout:
        name = process.stdout.readline().strip()
        with Workspace(tmp_path) as beside:
            assert beside.sweep() == {beside.name, name}
        assert (tmp_path / "work" / name / "upload").exists()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with Workspace(tmp_path) as after:
            assert after.sweep() == {after.name}
        assert not (tmp_path / "work" / name).exists()
