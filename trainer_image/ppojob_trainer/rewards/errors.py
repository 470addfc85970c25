"""What can go wrong with a reward function. Every message can be shown to the user as it is."""


class RewardError(RuntimeError):
    """Base of this package's errors."""


class RewardImportError(RewardError):
    """The function cannot be had: no such module or file, its import failed, no such name, a wrong signature."""


class RewardFunctionError(RewardError):
    """The function raised, or returned something that is no score. `index` is the prompt's index in the data."""

    def __init__(self, message: str, index: int | str) -> None:
        super().__init__(message, index)
        self.message = message
        self.index = index

    def __str__(self) -> str:
        return self.message


class RewardTimeoutError(RewardError):
    """The function did not come back in time; the message names the prompts that it was busy with."""


class RewardModelError(RewardError):
    """The reward model cannot read a conversation, or its score is not finite; names the prompt."""
