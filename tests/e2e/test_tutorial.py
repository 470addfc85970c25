"""The commands of docs/tutorial.md, without changes, on the real cluster.

Two things are the test's own: the image is that of this working tree, and the hub is a server of the tests, because the
machine that runs them reaches no hub. The jobs get its address as HF_ENDPOINT, as docs/models-and-data.md says for
mirrors.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.conftest import HUB_MODEL, Site
from tests.unit.trainer.fetch.hub_server import Hub
from tools.cluster.layout import PROJECT

pytestmark = pytest.mark.timeout(3600)

PAGE = PROJECT / "docs" / "tutorial.md"
FOLDER = Path("examples") / "11-own-model"
LIMIT_SECONDS = 2700
_SECTION = re.compile(r"^## (?P<title>.*)$", re.MULTILINE)
_COMMANDS = re.compile(r"^```sh\n(?P<commands>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Followed:
    """What the page's commands printed, by the title of the section, and the folder in which they ran."""

    printed: dict[str, str]
    folder: Path


def sections() -> dict[str, str]:
    """The shell commands of the page, by the title of their section; those before the first title are under ''."""
    titles = ["", *_SECTION.findall(PAGE.read_text())]
    texts = _SECTION.split(PAGE.read_text())[::2]
    commands = {title: "\n".join(_COMMANDS.findall(text)) for title, text in zip(titles, texts, strict=True)}
    return {title: text for title, text in commands.items() if text}


@pytest.fixture(scope="module")
def followed(site: Site, hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Followed]:
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(PROJECT / FOLDER, folder / FOLDER)
    _use_mirror(folder / FOLDER / "ppojob.yaml", hub.url)
    try:
        printed = _run(sections(), folder, _environment(site, folder))
        yield Followed(printed, folder)
    finally:
        left = ("ppojob/own-model", "pod/workspace", "service/own-model", "deployment/own-model")
        site.kubectl("delete", *left, "--ignore-not-found", "--timeout=300s", limit=330)


def _use_mirror(file: Path, hub: str) -> None:
    job = yaml.safe_load(file.read_text())
    job["spec"]["env"] = [{"name": "HF_ENDPOINT", "value": hub}]
    file.write_text(yaml.safe_dump(job))


def _environment(site: Site, folder: Path) -> dict[str, str]:
    """What a user has set: the programs, and a kubectl whose current namespace is that of the tests."""
    config = folder / "kubeconfig"
    shutil.copy(site.cluster.kubeconfig, config)
    programs = [str(site.cluster.layout.bin), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = os.environ | {"KUBECONFIG": str(config), "PATH": os.pathsep.join(programs)}
    namespace = ("config", "set-context", "--current", f"--namespace={site.namespace}")
    subprocess.run(["kubectl", *namespace], env=environment, check=True, timeout=240)
    # The page's first block uses it; users put the name of their image there.
    return environment | {"IMAGE_OF_THE_TEST": site.trainer_image}


def _run(commands: dict[str, str], folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """Run all sections in one shell, until one fails; return what each printed."""
    # What a command prints may end without a newline.
    script = "\n".join(f"printf '\\n@@ %s\\n' '{title}'\n{text}" for title, text in commands.items())
    script, count = re.subn(r"^export IMAGE=.*$", 'export IMAGE="$IMAGE_OF_THE_TEST"', script, flags=re.MULTILINE)
    assert count == 1
    done = subprocess.run(
        ["bash", "-e", "-u", "-o", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    parts = re.split(r"^@@ (.*)\n", done.stdout, flags=re.MULTILINE)
    printed = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert done.returncode == 0, (
        f"the section {list(printed)[-1]!r} failed: {done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    )
    return printed


def test_the_job_is_valid_runs_to_its_end_and_reports_the_rewards_own_metrics(followed: Followed) -> None:
    assert "valid" in followed.printed["4. The job"]
    watched = followed.printed["5. Watch it"]
    rows = [line.split() for line in watched.splitlines() if re.match(r" *\d+ ", line)]
    assert [int(row[0]) for row in rows] == list(range(1, 5))
    assert all(0 <= float(row[1]) <= 1.2 and 0 <= float(row[2]) <= 1 for row in rows)
    assert (followed.folder / "own-model.png").read_bytes().startswith(b"\x89PNG")


def test_the_model_was_fetched_before_there_were_pools(site: Site, hub: Hub, followed: Followed) -> None:
    fetched = site.folder / "sources" / "hf" / "models" / HUB_MODEL / "main"
    marker = json.loads((fetched / ".ppojob-source.json").read_text())
    assert marker["address"] == f"hf://{HUB_MODEL}"
    assert hub.downloads("model.safetensors") == 1
    names = {path.name for path in fetched.iterdir() if path.is_file() and not path.name.startswith(".")}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names


def test_the_model_that_was_copied_is_complete_and_was_trained(site: Site, followed: Followed) -> None:
    copied = followed.folder / "own-model"
    assert AutoTokenizer.from_pretrained(copied).chat_template
    trained = AutoModelForCausalLM.from_pretrained(copied).state_dict()
    base = AutoModelForCausalLM.from_pretrained(site.folder / "models" / "smollm2-135m-instruct").state_dict()
    assert trained.keys() == base.keys()
    assert any(not trained[name].equal(base[name]) for name in trained)


def test_the_model_that_is_served_answers(followed: Followed) -> None:
    [line] = [line for line in followed.printed["6. The trained model"].splitlines() if line.startswith("{")]
    answer: Any = json.loads(line)
    assert answer["model"] == "own-model"
    assert answer["choices"][0]["message"]["content"].strip()
