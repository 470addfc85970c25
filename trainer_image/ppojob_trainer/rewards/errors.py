"""What can go wrong with a reward function. Every message can be shown to the user as it is."""


class RewardError(RuntimeError):
    """Base of this package's errors."""


class RewardImportError(RewardError):
    """The function cannot be used: no such module, file or name, its import failed, or its signature is wrong."""


class RewardRefusedError(RewardError):
    """The function's own check refuses its arguments or the names of the data sets."""


class RewardProcessError(RewardError):
    """A process of the reward function cannot be started again."""


class RewardFunctionError(RewardError):
    """The function raised, ended its process, exceeded its time or returned no score.

    `index` is the prompt's index in the data; -1 where the error is about the whole batch.
    """

    def __init__(self, message: str, index: int | str) -> None:
        super().__init__(message, index)
        self.message = message
        self.index = index

    def __str__(self) -> str:
        return self.message


class RewardTimeoutError(RewardFunctionError):
    """The function exceeded the time limit of one response."""


class RewardModelError(RewardError):
    """The reward model cannot read a conversation, or its score is not finite; names the prompt."""
