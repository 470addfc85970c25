"""Fetches models and data by their addresses into the storage, before a trainer starts.

    __main__   the program of the Job that the operator creates: reports, messages, exit codes
    fetching   what is done in which order: list, check, compare sizes with the free space, download, publish
    hub, buckets   where the files come from
    model_files, checks   which files a model needs; what is refused before and after a download

A complete folder appears by a rename and has a marker in it. The trainer's engines see plain folders only.
"""

from ppojob_trainer.commands.fetch.errors import FetchError, FetchRefusedError
from ppojob_trainer.commands.fetch.fetching import State, fetch_all

__all__ = ["FetchError", "FetchRefusedError", "State", "fetch_all"]
