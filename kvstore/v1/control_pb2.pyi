from kvstore.v1 import kvstore_pb2 as _kvstore_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LookupRequest(_message.Message):
    __slots__ = ("namespace", "tokens", "chunks_max")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_MAX_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    tokens: bytes
    chunks_max: int
    def __init__(self, namespace: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., chunks_max: _Optional[int] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkPlace]
    def __init__(self, chunks: _Optional[_Iterable[_Union[ChunkPlace, _Mapping]]] = ...) -> None: ...

class ChunkPlace(_message.Message):
    __slots__ = ("index", "address", "root", "memory", "disk", "peers", "pins")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    index: int
    address: bytes
    root: RootCopy
    memory: MemoryCopy
    disk: bool
    peers: _containers.RepeatedScalarFieldContainer[str]
    pins: int
    def __init__(self, index: _Optional[int] = ..., address: _Optional[bytes] = ..., root: _Optional[_Union[RootCopy, _Mapping]] = ..., memory: _Optional[_Union[MemoryCopy, _Mapping]] = ..., disk: bool = ..., peers: _Optional[_Iterable[str]] = ..., pins: _Optional[int] = ...) -> None: ...

class RootCopy(_message.Message):
    __slots__ = ("bytes", "last_use_s", "uses", "hints", "compressed", "encrypted", "key_id", "condemned")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_USE_S_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    COMPRESSED_FIELD_NUMBER: _ClassVar[int]
    ENCRYPTED_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    CONDEMNED_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    last_use_s: int
    uses: int
    hints: _kvstore_pb2.Hints
    compressed: bool
    encrypted: bool
    key_id: bytes
    condemned: bool
    def __init__(self, bytes: _Optional[int] = ..., last_use_s: _Optional[int] = ..., uses: _Optional[int] = ..., hints: _Optional[_Union[_kvstore_pb2.Hints, _Mapping]] = ..., compressed: bool = ..., encrypted: bool = ..., key_id: _Optional[bytes] = ..., condemned: bool = ...) -> None: ...

class MemoryCopy(_message.Message):
    __slots__ = ("bytes", "dirty", "users")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DIRTY_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    dirty: bool
    users: int
    def __init__(self, bytes: _Optional[int] = ..., dirty: bool = ..., users: _Optional[int] = ...) -> None: ...

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

class GetLimitsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetLimitsRequest(_message.Message):
    __slots__ = ("limits",)
    class LimitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    limits: _containers.ScalarMap[str, str]
    def __init__(self, limits: _Optional[_Mapping[str, str]] = ...) -> None: ...

class LimitsResponse(_message.Message):
    __slots__ = ("limits",)
    class LimitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    limits: _containers.ScalarMap[str, str]
    def __init__(self, limits: _Optional[_Mapping[str, str]] = ...) -> None: ...

class HealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthResponse(_message.Message):
    __slots__ = ("healthy", "problems", "worker", "root", "etcd", "memory", "queues")
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    ETCD_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    healthy: bool
    problems: _containers.RepeatedScalarFieldContainer[str]
    worker: WorkerHealth
    root: RootHealth
    etcd: EtcdHealth
    memory: MemoryHealth
    queues: QueueHealth
    def __init__(self, healthy: bool = ..., problems: _Optional[_Iterable[str]] = ..., worker: _Optional[_Union[WorkerHealth, _Mapping]] = ..., root: _Optional[_Union[RootHealth, _Mapping]] = ..., etcd: _Optional[_Union[EtcdHealth, _Mapping]] = ..., memory: _Optional[_Union[MemoryHealth, _Mapping]] = ..., queues: _Optional[_Union[QueueHealth, _Mapping]] = ...) -> None: ...

class WorkerHealth(_message.Message):
    __slots__ = ("address", "version", "host", "pid", "uptime_s", "serving", "draining", "log_level")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    address: str
    version: str
    host: str
    pid: int
    uptime_s: float
    serving: bool
    draining: bool
    log_level: str
    def __init__(self, address: _Optional[str] = ..., version: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., uptime_s: _Optional[float] = ..., serving: bool = ..., draining: bool = ..., log_level: _Optional[str] = ...) -> None: ...

class RootHealth(_message.Message):
    __slots__ = ("url", "id", "answers", "look_s", "total_bytes", "free_bytes", "full")
    URL_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    LOOK_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    url: str
    id: bytes
    answers: bool
    look_s: float
    total_bytes: int
    free_bytes: int
    full: bool
    def __init__(self, url: _Optional[str] = ..., id: _Optional[bytes] = ..., answers: bool = ..., look_s: _Optional[float] = ..., total_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., full: bool = ...) -> None: ...

class EtcdHealth(_message.Message):
    __slots__ = ("used", "answers", "look_s", "session_alive", "protected", "lease_margin_s")
    USED_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    LOOK_S_FIELD_NUMBER: _ClassVar[int]
    SESSION_ALIVE_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_FIELD_NUMBER: _ClassVar[int]
    LEASE_MARGIN_S_FIELD_NUMBER: _ClassVar[int]
    used: bool
    answers: bool
    look_s: float
    session_alive: bool
    protected: bool
    lease_margin_s: float
    def __init__(self, used: bool = ..., answers: bool = ..., look_s: _Optional[float] = ..., session_alive: bool = ..., protected: bool = ..., lease_margin_s: _Optional[float] = ...) -> None: ...

class MemoryHealth(_message.Message):
    __slots__ = ("size_bytes", "held_bytes", "dirty_bytes", "referenced_bytes", "disk_held_bytes", "disk_bytes_max", "peers", "peers_aside")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIRTY_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFERENCED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    PEERS_ASIDE_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    held_bytes: int
    dirty_bytes: int
    referenced_bytes: int
    disk_held_bytes: int
    disk_bytes_max: int
    peers: int
    peers_aside: int
    def __init__(self, size_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ..., dirty_bytes: _Optional[int] = ..., referenced_bytes: _Optional[int] = ..., disk_held_bytes: _Optional[int] = ..., disk_bytes_max: _Optional[int] = ..., peers: _Optional[int] = ..., peers_aside: _Optional[int] = ...) -> None: ...

class QueueHealth(_message.Message):
    __slots__ = ("calls", "calls_max", "bytes_in_flight", "bytes_in_flight_max", "root_queue", "behind_bytes", "behind_bytes_max", "holds", "operations_running", "operations_waiting")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    CALLS_MAX_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FLIGHT_MAX_FIELD_NUMBER: _ClassVar[int]
    ROOT_QUEUE_FIELD_NUMBER: _ClassVar[int]
    BEHIND_BYTES_FIELD_NUMBER: _ClassVar[int]
    BEHIND_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_WAITING_FIELD_NUMBER: _ClassVar[int]
    calls: int
    calls_max: int
    bytes_in_flight: int
    bytes_in_flight_max: int
    root_queue: int
    behind_bytes: int
    behind_bytes_max: int
    holds: int
    operations_running: int
    operations_waiting: int
    def __init__(self, calls: _Optional[int] = ..., calls_max: _Optional[int] = ..., bytes_in_flight: _Optional[int] = ..., bytes_in_flight_max: _Optional[int] = ..., root_queue: _Optional[int] = ..., behind_bytes: _Optional[int] = ..., behind_bytes_max: _Optional[int] = ..., holds: _Optional[int] = ..., operations_running: _Optional[int] = ..., operations_waiting: _Optional[int] = ...) -> None: ...
