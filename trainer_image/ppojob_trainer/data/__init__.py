"""Prompts: where they come from (`sources`), how they become token ids (`tokenize`, `tokens`), their order (`loader`).

No ray here and no models; any HuggingFace tokenizer is passed in.
"""

from ppojob_trainer.data.cache import TableCache
from ppojob_trainer.data.dataset import PromptDataset
from ppojob_trainer.data.errors import DataError
from ppojob_trainer.data.loader import PromptLoader, WeightedDataset
from ppojob_trainer.data.records import PromptRecord, PromptSource
from ppojob_trainer.data.sources import open_source
from ppojob_trainer.data.tokenize import PromptTokenizer, Tokenizer
from ppojob_trainer.data.tokens import Preparation, TokenizedPrompts

__all__ = [
    "DataError",
    "Preparation",
    "PromptDataset",
    "PromptLoader",
    "PromptRecord",
    "PromptSource",
    "PromptTokenizer",
    "TableCache",
    "TokenizedPrompts",
    "Tokenizer",
    "WeightedDataset",
    "open_source",
]
