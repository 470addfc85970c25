"""What goes between worker groups: `DataProto`, the names of its columns, and the layout of a rollout.

Everything in the trainer may import this package, and it imports nothing of the trainer. No ray here: columns pickle
well through any object store.
"""

from ppojob_trainer.protocol.data_proto import DataProto
from ppojob_trainer.protocol.errors import ProtocolError
from ppojob_trainer.protocol.fields import FIELDS, ROLLOUT_COLUMNS, SEQUENCES, Field, check_layout
from ppojob_trainer.protocol.keys import Keys, Meta
from ppojob_trainer.protocol.layout import Experts, object_array, responses_to_lists, rollout_batch
from ppojob_trainer.protocol.ragged import Ragged

__all__ = [
    "FIELDS",
    "ROLLOUT_COLUMNS",
    "SEQUENCES",
    "DataProto",
    "Experts",
    "Field",
    "Keys",
    "Meta",
    "ProtocolError",
    "Ragged",
    "check_layout",
    "object_array",
    "responses_to_lists",
    "rollout_batch",
]
