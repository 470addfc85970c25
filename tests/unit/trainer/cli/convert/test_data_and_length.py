"""What `ppojob convert` makes of the data's files and of the run's length."""

import pytest

from ppojob_trainer.commands.convert import Target, convert, read_arguments
from tests.unit.trainer.cli.convert.test_convert import SAID, value_at


@pytest.mark.parametrize(
    ("words", "length"),
    [
        ((), {"totalEpochs": 30}),
        (("trainer.total_epochs=3",), {"totalEpochs": 3}),
        (("trainer.total_epochs=3", "trainer.total_training_steps=50"), {"totalSteps": 50}),
    ],
    ids=["default", "epochs", "steps win"],
)
def test_epochs_and_steps_are_taken_over(words: tuple[str, ...], length: dict[str, int]) -> None:
    trainer = value_at(convert(read_arguments([*SAID[:2], *words])), "trainer")

    assert {name: value for name, value in trainer.items() if name.startswith("total")} == length


@pytest.mark.parametrize("files", ["", "['']"])
def test_an_empty_path_of_an_unset_variable_is_no_file(files: str) -> None:
    words = [f"data.train_files={files}", f"data.val_files={files}", *SAID[1:]]
    conversion = convert(read_arguments(words))

    assert value_at(conversion, "data.train.files.paths") == ["/data/train.parquet"]
    asked = {entry.name for entry in conversion.entries if entry.kind is Target.TO_FILL}
    assert {"data.train.files.paths", "data.validation"} <= asked
