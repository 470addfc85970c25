"""What docs/rewards.md shows is valid: its blocks are PPOJob sections, its functions score, its tables are complete."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.reward import OnError
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.rewards import FunctionSource, by_data_source, load_reward_function
from ppojob_trainer.rewards.extractors import EXTRACTORS
from ppojob_trainer.rewards.loader import check_reward_function
from ppojob_trainer.rewards.retries import TRANSIENT_STATUS
from ppojob_trainer.rewards.scoring.processes import DEFAULT_CALLS, GRACE_S
from tests.good_spec import GOOD

PAGE = Path("docs/rewards.md").read_text()
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
FILES = dict(re.findall(r"^```python\n# /data/(\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
MODULES = set(
    re.findall(r"^\| `(\w+)` \|", PAGE.split("## Built-in functions")[1].split("An example")[0], re.MULTILINE)
)
NO_FUNCTIONS = {"__init__", "batch", "errors", "extractors", "interface", "loader", "model_input", "retries", "samples"}


def source_of(block: str, folder: Path) -> FunctionSource:
    """Return the function of a block, after the whole spec with it was judged."""
    spec = parse_spec({**GOOD["spec"], **yaml.safe_load(block)})
    function = spec.reward.function
    assert function is not None
    path = function.path
    if path is not None:
        path = str(folder / Path(path).name)
        Path(path).write_text(FILES[Path(path).name])
    return FunctionSource(function.module, path, function.name, function.extract, function.kwargs)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_names_a_function_that_can_be_called(block: str, tmp_path: Path) -> None:
    source = source_of(block, tmp_path)

    load_reward_function(source)
    check_reward_function(source, ["openai/gsm8k"])


def test_the_functions_of_ones_own_score(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(FILES["reward.py"])
    (tmp_path / "judge.py").write_text(FILES["judge.py"])
    arguments: dict[str, Any] = {"data_source": "s", "ground_truth": "72", "extra_info": {}}

    own: Any = load_reward_function(FunctionSource(path=str(tmp_path / "reward.py"), kwargs={"most_words": 3}))

    assert own(solution_str="it is 72", **arguments) == {"score": 1.0, "is_right": True, "words": 3}
    assert own(solution_str="so it is 72", **arguments)["score"] == 0.0
    load_reward_function(FunctionSource(path=str(tmp_path / "judge.py")))


def test_the_tables_have_all_that_there_is() -> None:
    folder = Path("trainer_image/ppojob_trainer/rewards")
    assert {path.stem for path in folder.glob("*.py")} - NO_FUNCTIONS == MODULES
    named = [*by_data_source.COUNTERPARTS, *(f"{prefix}*" for prefix in by_data_source.PREFIXES)]
    assert [name for name in named if f"`{name}`" not in PAGE and not name.startswith("numina_")] == []
    assert sum(name.startswith("numina_") for name in named) == 6
    assert [policy.value for policy in OnError if f"| `{policy.value}` |" not in PAGE] == []
    assert [name for name in EXTRACTORS if f"`{name}`" not in PAGE] == []
    assert f"`{Reason.REWARD_FAILED}`" in PAGE


def test_the_numbers_are_those_of_the_code() -> None:
    assert f"up to {DEFAULT_CALLS} calls" in PAGE
    assert f"terminated {GRACE_S:g} s later" in PAGE.replace("\n", " ")
    *most, last = sorted(TRANSIENT_STATUS)
    assert f"{', '.join(map(str, most))} or {last}" in PAGE.replace("\n", " ")
