from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Write(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WRITE_UNSPECIFIED: _ClassVar[Write]
    WRITE_THROUGH: _ClassVar[Write]
    WRITE_BEHIND: _ClassVar[Write]
    WRITE_UNCACHED: _ClassVar[Write]
WRITE_UNSPECIFIED: Write
WRITE_THROUGH: Write
WRITE_BEHIND: Write
WRITE_UNCACHED: Write

class Layout(_message.Message):
    __slots__ = ("layers", "kv_heads", "head_dim", "dtype", "chunk_tokens")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    chunk_tokens: int
    def __init__(self, layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class Attribute(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("name", "layout", "fingerprint", "tenant", "attributes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    layout: Layout
    fingerprint: str
    tenant: str
    attributes: _containers.RepeatedCompositeFieldContainer[Attribute]
    def __init__(self, name: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., fingerprint: _Optional[str] = ..., tenant: _Optional[str] = ..., attributes: _Optional[_Iterable[_Union[Attribute, _Mapping]]] = ...) -> None: ...

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: Namespace
    def __init__(self, namespace: _Optional[_Union[Namespace, _Mapping]] = ...) -> None: ...

class OpenNamespaceResponse(_message.Message):
    __slots__ = ("digest", "section_bytes", "section_count", "chunk_bytes")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SECTION_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECTION_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    section_bytes: int
    section_count: int
    chunk_bytes: int
    def __init__(self, digest: _Optional[bytes] = ..., section_bytes: _Optional[int] = ..., section_count: _Optional[int] = ..., chunk_bytes: _Optional[int] = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNamespacesResponse(_message.Message):
    __slots__ = ("digest", "namespace")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    namespace: Namespace
    def __init__(self, digest: _Optional[bytes] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("namespace", "tokens", "uncounted", "lengths")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNCOUNTED_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    tokens: bytes
    uncounted: bool
    lengths: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., uncounted: bool = ..., lengths: _Optional[bytes] = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("chunks", "tokens", "each")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EACH_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    tokens: int
    each: bytes
    def __init__(self, chunks: _Optional[int] = ..., tokens: _Optional[int] = ..., each: _Optional[bytes] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("start", "index", "data")
    START_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    start: PutStart
    index: int
    data: bytes
    def __init__(self, start: _Optional[_Union[PutStart, _Mapping]] = ..., index: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutStart(_message.Message):
    __slots__ = ("namespace", "tokens", "first", "hints", "write", "keys", "sizes", "descents")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    DESCENTS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    tokens: bytes
    first: int
    hints: Hints
    write: Write
    keys: bytes
    sizes: bytes
    descents: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., first: _Optional[int] = ..., hints: _Optional[_Union[Hints, _Mapping]] = ..., write: _Optional[_Union[Write, str]] = ..., keys: _Optional[bytes] = ..., sizes: _Optional[bytes] = ..., descents: _Optional[bytes] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("tokens_present", "chunks_written", "chunks_found", "bytes_written", "reason", "stored")
    TOKENS_PRESENT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FOUND_FIELD_NUMBER: _ClassVar[int]
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    tokens_present: int
    chunks_written: int
    chunks_found: int
    bytes_written: int
    reason: str
    stored: bytes
    def __init__(self, tokens_present: _Optional[int] = ..., chunks_written: _Optional[int] = ..., chunks_found: _Optional[int] = ..., bytes_written: _Optional[int] = ..., reason: _Optional[str] = ..., stored: _Optional[bytes] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("namespace", "tokens", "hold", "first", "chunks_max", "memory_only", "uncounted", "keys", "sizes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_MAX_FIELD_NUMBER: _ClassVar[int]
    MEMORY_ONLY_FIELD_NUMBER: _ClassVar[int]
    UNCOUNTED_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    tokens: bytes
    hold: bytes
    first: int
    chunks_max: int
    memory_only: bool
    uncounted: bool
    keys: bytes
    sizes: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., hold: _Optional[bytes] = ..., first: _Optional[int] = ..., chunks_max: _Optional[int] = ..., memory_only: bool = ..., uncounted: bool = ..., keys: _Optional[bytes] = ..., sizes: _Optional[bytes] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("start", "index", "data")
    START_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    start: GetStart
    index: int
    data: bytes
    def __init__(self, start: _Optional[_Union[GetStart, _Mapping]] = ..., index: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class GetStart(_message.Message):
    __slots__ = ("chunks", "tokens")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    tokens: int
    def __init__(self, chunks: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class HoldRequest(_message.Message):
    __slots__ = ("namespace", "tokens", "ttl_s", "keys", "uncounted")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    UNCOUNTED_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    tokens: bytes
    ttl_s: float
    keys: bytes
    uncounted: bool
    def __init__(self, namespace: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., ttl_s: _Optional[float] = ..., keys: _Optional[bytes] = ..., uncounted: bool = ...) -> None: ...

class HoldResponse(_message.Message):
    __slots__ = ("hold", "chunks", "tokens", "lease_s", "present")
    HOLD_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    hold: bytes
    chunks: int
    tokens: int
    lease_s: float
    present: bytes
    def __init__(self, hold: _Optional[bytes] = ..., chunks: _Optional[int] = ..., tokens: _Optional[int] = ..., lease_s: _Optional[float] = ..., present: _Optional[bytes] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("holds",)
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    holds: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, holds: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("ended",)
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ended: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, ended: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("hold",)
    HOLD_FIELD_NUMBER: _ClassVar[int]
    hold: bytes
    def __init__(self, hold: _Optional[bytes] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: bool = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("namespace", "tokens", "ttl_s", "owner", "keys")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    tokens: bytes
    ttl_s: float
    owner: str
    keys: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., ttl_s: _Optional[float] = ..., owner: _Optional[str] = ..., keys: _Optional[bytes] = ...) -> None: ...

class PinRecord(_message.Message):
    __slots__ = ("id", "owner", "namespace", "tokens", "expires_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    owner: str
    namespace: str
    tokens: int
    expires_s: float
    def __init__(self, id: _Optional[str] = ..., owner: _Optional[str] = ..., namespace: _Optional[str] = ..., tokens: _Optional[int] = ..., expires_s: _Optional[float] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("pin",)
    PIN_FIELD_NUMBER: _ClassVar[int]
    pin: PinRecord
    def __init__(self, pin: _Optional[_Union[PinRecord, _Mapping]] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class ListPinsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPinsResponse(_message.Message):
    __slots__ = ("pin",)
    PIN_FIELD_NUMBER: _ClassVar[int]
    pin: PinRecord
    def __init__(self, pin: _Optional[_Union[PinRecord, _Mapping]] = ...) -> None: ...

class CountRefsRequest(_message.Message):
    __slots__ = ("namespace", "tokens")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    tokens: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class CountRefsResponse(_message.Message):
    __slots__ = ("refs",)
    REFS_FIELD_NUMBER: _ClassVar[int]
    refs: int
    def __init__(self, refs: _Optional[int] = ...) -> None: ...

class MatchBlocksRequest(_message.Message):
    __slots__ = ("namespace", "keys", "each")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    EACH_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: bytes
    each: bool
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., each: bool = ...) -> None: ...

class MatchBlocksResponse(_message.Message):
    __slots__ = ("blocks", "present")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    present: bytes
    def __init__(self, blocks: _Optional[int] = ..., present: _Optional[bytes] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    def __init__(self, namespace: _Optional[bytes] = ...) -> None: ...

class ClearResponse(_message.Message):
    __slots__ = ("chunks", "bytes", "unconfirmed", "pinned")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    UNCONFIRMED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    bytes: int
    unconfirmed: _containers.RepeatedScalarFieldContainer[str]
    pinned: int
    def __init__(self, chunks: _Optional[int] = ..., bytes: _Optional[int] = ..., unconfirmed: _Optional[_Iterable[str]] = ..., pinned: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("counters", "gauges")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    counters: _containers.ScalarMap[str, int]
    gauges: _containers.ScalarMap[str, float]
    def __init__(self, counters: _Optional[_Mapping[str, int]] = ..., gauges: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Hints(_message.Message):
    __slots__ = ("priority", "ttl_s")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    priority: int
    ttl_s: float
    def __init__(self, priority: _Optional[int] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class OpenBulkRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class OpenBulkResponse(_message.Message):
    __slots__ = ("unix_path", "boot_id", "tcp_port", "grant", "secret", "ttl_s", "files", "memory", "memory_bytes")
    UNIX_PATH_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TCP_PORT_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    unix_path: str
    boot_id: str
    tcp_port: int
    grant: bytes
    secret: bytes
    ttl_s: float
    files: bool
    memory: bytes
    memory_bytes: int
    def __init__(self, unix_path: _Optional[str] = ..., boot_id: _Optional[str] = ..., tcp_port: _Optional[int] = ..., grant: _Optional[bytes] = ..., secret: _Optional[bytes] = ..., ttl_s: _Optional[float] = ..., files: bool = ..., memory: _Optional[bytes] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class BulkRefusal(_message.Message):
    __slots__ = ("code", "message", "trailers")
    class TrailersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRAILERS_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    trailers: _containers.ScalarMap[str, str]
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., trailers: _Optional[_Mapping[str, str]] = ...) -> None: ...
