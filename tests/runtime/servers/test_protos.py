"""Generated modules are what the .proto files give, and these are compatible with the protocol that clients speak."""

import json
import subprocess
import sys
from typing import Any

from google.protobuf import descriptor_pb2

from ingot.runtime.servers.proto import kserve_v2_pb2
from tools.generate_protos import generate, stale

# In a process of its own: both sides register the same names.
_DUMP = """
import json, sys
from google.protobuf import descriptor_pb2
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import model_config_pb2, service_pb2
files = []
for module in (model_config_pb2, service_pb2):
    file = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    files.append(MessageToDict(file))
json.dump(files, sys.stdout)
"""


def test_the_generated_modules_are_up_to_date() -> None:
    assert stale(generate()) == [], "run: python -m tools.generate_protos"


def test_a_changed_proto_is_noticed() -> None:
    generated = generate()
    changed = {**generated, "control_pb2.py": generated["control_pb2.py"] + "\n", "new_pb2.py": ""}
    del changed["kserve_v2_pb2_grpc.py"]
    assert stale(changed) == ["control_pb2.py", "kserve_v2_pb2_grpc.py", "new_pb2.py"]


def test_kserve_is_part_of_what_tritons_client_speaks() -> None:
    """Every message, field (number, type), enum value and method of ours is one of theirs."""
    done = subprocess.run([sys.executable, "-c", _DUMP], capture_output=True, text=True, check=True)
    theirs = {"messages": {}, "enums": {}, "methods": {}}  # type: dict[str, dict[str, Any]]
    for file in json.loads(done.stdout):
        collect(file, theirs)
    ours = {"messages": {}, "enums": {}, "methods": {}}  # type: dict[str, dict[str, Any]]
    proto = descriptor_pb2.FileDescriptorProto()
    kserve_v2_pb2.DESCRIPTOR.CopyToProto(proto)
    from google.protobuf.json_format import MessageToDict

    collect(MessageToDict(proto), ours)
    assert len(ours["messages"]) > 20 and len(ours["methods"]) == 10
    for kind, entries in ours.items():
        for name, entry in entries.items():
            assert entry.items() <= theirs[kind][name].items(), f"{kind} {name}"


def collect(file: dict[str, Any], into: dict[str, dict[str, Any]]) -> None:
    assert file["package"] == "inference"
    for message in file.get("messageType", ()):
        _message(message, "", into)
    for enum in file.get("enumType", ()):
        into["enums"][enum["name"]] = {each["name"]: each.get("number", 0) for each in enum["value"]}
    for service in file.get("service", ()):
        for method in service["method"]:
            into["methods"][f"{service['name']}.{method['name']}"] = method


def _message(message: dict[str, Any], prefix: str, into: dict[str, dict[str, Any]]) -> None:
    name = prefix + message["name"]
    oneofs = [each["name"] for each in message.get("oneofDecl", ())]
    into["messages"][name] = {
        each["name"]: (each["number"], each["type"], each["label"], each.get("typeName"),
                       oneofs[each["oneofIndex"]] if "oneofIndex" in each else None)
        for each in message.get("field", ())}
    for nested in message.get("nestedType", ()):
        _message(nested, name + ".", into)
