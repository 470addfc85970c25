"""The messages of the kubelet's device plugin interface, v1beta1, as far as the plugin here speaks it.

They are described in Python and not generated: the machine without a network has protobuf and no compiler for it.
Field numbers are those of k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1/api.proto.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "v1beta1"
VERSION = "v1beta1"
_TEXT = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_FLAG = descriptor_pb2.FieldDescriptorProto.TYPE_BOOL
_MESSAGE = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
# message -> field -> number, type (a message's name, or a plain type), whether it is a list
_MESSAGES: dict[str, dict[str, tuple[int, str | int, bool]]] = {
    "Empty": {},
    "DevicePluginOptions": {
        "pre_start_required": (1, _FLAG, False),
        "get_preferred_allocation_available": (2, _FLAG, False),
    },
    "RegisterRequest": {
        "version": (1, _TEXT, False),
        "endpoint": (2, _TEXT, False),
        "resource_name": (3, _TEXT, False),
        "options": (4, "DevicePluginOptions", False),
    },
    "Device": {"ID": (1, _TEXT, False), "health": (2, _TEXT, False)},
    "ListAndWatchResponse": {"devices": (1, "Device", True)},
    "ContainerAllocateRequest": {"devices_ids": (1, _TEXT, True)},
    "AllocateRequest": {"container_requests": (1, "ContainerAllocateRequest", True)},
    "DeviceSpec": {
        "container_path": (1, _TEXT, False),
        "host_path": (2, _TEXT, False),
        "permissions": (3, _TEXT, False),
    },
    # On the wire a map is a list of such pairs.
    "Variable": {"key": (1, _TEXT, False), "value": (2, _TEXT, False)},
    "ContainerAllocateResponse": {"envs": (1, "Variable", True), "devices": (3, "DeviceSpec", True)},
    "AllocateResponse": {"container_responses": (1, "ContainerAllocateResponse", True)},
}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="ppojob/deviceplugin.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, is_list) in fields.items():
            message.field.add(
                name=field,
                number=number,
                type=_MESSAGE if isinstance(kind, str) else kind,
                type_name=f".{PACKAGE}.{kind}" if isinstance(kind, str) else None,
                label=descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
                if is_list
                else descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _MESSAGES
    }


_CLASSES = _classes()
Empty = _CLASSES["Empty"]
DevicePluginOptions = _CLASSES["DevicePluginOptions"]
RegisterRequest = _CLASSES["RegisterRequest"]
Device = _CLASSES["Device"]
ListAndWatchResponse = _CLASSES["ListAndWatchResponse"]
AllocateRequest = _CLASSES["AllocateRequest"]
ContainerAllocateRequest = _CLASSES["ContainerAllocateRequest"]
DeviceSpec = _CLASSES["DeviceSpec"]
Variable = _CLASSES["Variable"]
ContainerAllocateResponse = _CLASSES["ContainerAllocateResponse"]
AllocateResponse = _CLASSES["AllocateResponse"]
