"""The location of checkpoints: a folder, or an address in an object store (`s3://bucket/prefix`, `gs://bucket/prefix`).

Both are strings everywhere: as a `Path`, an address would lose one of its slashes.
"""

SCHEMES = ("s3://", "gs://")


def is_address(location: str) -> bool:
    """Return whether the location is in an object store."""
    return location.startswith(SCHEMES)


def below(location: str, name: str) -> str:
    """Return the location of a name in a folder or below an address."""
    return f"{location.rstrip('/')}/{name}"


def split(address: str) -> tuple[str, str]:
    """Return the address of the bucket alone and the key: `s3://bucket/a/b` is `s3://bucket` and `a/b`."""
    scheme, _, rest = address.partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", key.strip("/")
