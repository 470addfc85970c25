"""What goes between worker groups: `DataProto`, the names of its fields, and the layout of a rollout.

Everything in the trainer may import this package, and it imports nothing of the trainer. No ray here: it pickles
well through any object store.
"""

from ppojob_trainer.protocol.data_proto import DataProto, ProtocolError
from ppojob_trainer.protocol.fields import FIELDS, Field, check_layout
from ppojob_trainer.protocol.keys import Keys, Meta
from ppojob_trainer.protocol.layout import (
    object_array,
    position_ids_from_mask,
    response_part,
    responses_to_lists,
    rollout_batch,
)

__all__ = [
    "FIELDS",
    "DataProto",
    "Field",
    "Keys",
    "Meta",
    "ProtocolError",
    "check_layout",
    "object_array",
    "position_ids_from_mask",
    "response_part",
    "responses_to_lists",
    "rollout_batch",
]
