"""Code that a PPOJob names is the same module in every process that imports it."""

import subprocess
import sys
from pathlib import Path

import pytest

from ppojob_trainer.user_code import UserCodeError, import_user_code

SHOW_NAME = (
    "import sys\nfrom ppojob_trainer.user_code import import_user_code\n"
    "print(import_user_code('workers[0]', None, sys.argv[1]).__name__)\n"
)


def test_a_file_is_executed_once_in_a_process(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text("seen = []\n")

    first = import_user_code("workers[0]", None, path)
    first.seen.append(1)

    assert import_user_code("workers[0]", None, str(path)).seen == [1]
    assert sys.modules[first.__name__] is first


def test_where_a_config_map_is_mounted_all_pods_give_the_module_one_name(tmp_path: Path) -> None:
    # The kubelet links the file into a folder with the time in its name, another in each pod.
    names = []
    for pod in ("..2026_11_21_13_00_00.1", "..2026_11_21_13_00_05.2"):
        (tmp_path / pod).mkdir()
        (tmp_path / pod / "code.py").write_text("")
        link = tmp_path / "code.py"
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / pod / "code.py")
        shown = subprocess.run(
            [sys.executable, "-c", SHOW_NAME, str(link)], capture_output=True, text=True, timeout=120, check=True
        )
        names.append(shown.stdout.strip())

    assert names[0] == names[1]
    assert names[0].startswith("ppojob_user_")


def test_an_import_that_fails_leaves_no_half_module(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text("raise RuntimeError('no licence')\n")

    with pytest.raises(UserCodeError, match=r"workers\[0\]\.path '.*code.py': its import failed .* no licence"):
        import_user_code("workers[0]", None, path)

    assert not [name for name, module in sys.modules.items() if getattr(module, "__file__", None) == str(path)]
