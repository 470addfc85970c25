"""The one exception of this package."""


class DataError(ValueError):
    """The data cannot be read or used; the message names the path or task, the row, and what to do."""
