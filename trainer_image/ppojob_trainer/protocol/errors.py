"""The one exception of this package."""


class ProtocolError(ValueError):
    """A batch does not fit the operation or the layout; the message names the field and the remedy."""
