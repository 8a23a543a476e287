from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Selection(_message.Message):
    __slots__ = ("namespace", "tenant", "fingerprint")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    tenant: str
    fingerprint: str
    def __init__(self, namespace: _Optional[bytes] = ..., tenant: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("namespace", "tokens", "tier")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    tokens: bytes
    tier: str
    def __init__(self, namespace: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., tier: _Optional[str] = ...) -> None: ...

class EvictFirstRequest(_message.Message):
    __slots__ = ("namespace", "tokens")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    tokens: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class EvictFirstResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClearSelectedRequest(_message.Message):
    __slots__ = ("selection", "dry_run", "pinned")
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    selection: Selection
    dry_run: bool
    pinned: bool
    def __init__(self, selection: _Optional[_Union[Selection, _Mapping]] = ..., dry_run: bool = ..., pinned: bool = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("id", "kind", "about", "identity", "state", "began_s", "ended_s", "done", "total", "unit", "message", "counts", "worker")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BEGAN_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    id: str
    kind: str
    about: str
    identity: str
    state: str
    began_s: float
    ended_s: float
    done: int
    total: int
    unit: str
    message: str
    counts: _containers.ScalarMap[str, int]
    worker: str
    def __init__(self, id: _Optional[str] = ..., kind: _Optional[str] = ..., about: _Optional[str] = ..., identity: _Optional[str] = ..., state: _Optional[str] = ..., began_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., unit: _Optional[str] = ..., message: _Optional[str] = ..., counts: _Optional[_Mapping[str, int]] = ..., worker: _Optional[str] = ...) -> None: ...

class OperationResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ...) -> None: ...

class ListOperationsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetOperationRequest(_message.Message):
    __slots__ = ("id", "wait_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    wait_s: float
    def __init__(self, id: _Optional[str] = ..., wait_s: _Optional[float] = ...) -> None: ...

class CancelOperationRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...
